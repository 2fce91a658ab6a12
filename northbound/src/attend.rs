//! A memory server's side of operators' requests: a call to the controller that stays open, through which
//! questions arrive.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bluebridge_wire::{NodeId, Space};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::membership::{Connection, Shared};
use crate::proto;
use crate::proto::attend_request::Body as Said;
use crate::proto::attend_response::Body as Asked;
use crate::proto::operations_client::OperationsClient;
use crate::registration::Assignment;

/// Questions that may wait for a memory server.
const QUESTIONS_MAX: usize = 8;

/// The shortest and longest wait before an ended call is made again.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// How soon a controller without this call is called again: it may be updated.
const RETRY_UNKNOWN: Duration = Duration::from_secs(60);

/// A question of an operator to a memory server.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Ask {
    /// List or free allocations.
    Survey {
        /// The tenant.
        space: Space,
        /// The first page.
        from_page: u64,
        /// The most allocations.
        limit: u32,
        /// Only allocations of these incarnations of a node; `None` for all.
        creators: Option<(NodeId, RangeInclusive<u32>)>,
        /// Whether to free them.
        frees: bool,
    },
    /// The server's usage and refusals.
    Statistics {
        /// The tenant whose usage is requested.
        space: Space,
    },
}

/// A memory server's answer.
#[derive(Clone, Debug)]
pub enum Answer {
    /// An error, with its reason.
    Failure(String),
    /// The usage.
    Statistics(proto::StatisticsResponse),
    /// The allocations that were found or freed.
    Survey(proto::SurveyAnswer),
}

/// A question that waits for its answer. If it is dropped, the operator gets an error.
#[derive(Debug)]
pub struct Question {
    ask: Ask,
    id: u64,
    answers: Option<mpsc::Sender<proto::AttendRequest>>,
}

impl Question {
    /// The question.
    #[must_use]
    pub const fn ask(&self) -> &Ask {
        &self.ask
    }

    /// Sends the answer. It is lost if the controller was lost meanwhile.
    pub fn answer(mut self, answer: Answer) {
        self.send(answer);
    }

    /// Tells the controller that the question can be executed; returns whether that could be sent.
    fn send_ready(&mut self) -> bool {
        let body = Some(Said::Ready(proto::Ready {}));
        let ready = proto::AttendRequest { id: self.id, body };
        self.answers.as_ref().is_some_and(|answers| answers.try_send(ready).is_ok())
    }

    /// Drops the question without an answer.
    fn discard(mut self) {
        self.answers = None;
    }

    fn send(&mut self, answer: Answer) {
        let Some(answers) = self.answers.take() else { return };
        let body = match answer {
            Answer::Failure(words) => Said::Failure(words),
            Answer::Statistics(statistics) => Said::Statistics(statistics),
            Answer::Survey(survey) => Said::Survey(survey),
        };
        // There is room for as many answers as questions.
        let _ = answers.try_send(proto::AttendRequest { id: self.id, body: Some(body) });
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        self.send(Answer::Failure("the memory server does not support questions".to_owned()));
    }
}

/// The waiting questions.
#[derive(Debug, Default)]
pub(crate) struct Questions(Mutex<VecDeque<Question>>);

impl Questions {
    pub(crate) fn take(&self) -> Option<Question> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    fn put(&self, mut question: Question) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() < QUESTIONS_MAX {
            waiting.push_back(question);
        } else {
            question.send(Answer::Failure("too many questions at once; try again".to_owned()));
        }
    }
}

/// Keeps the call open as long as the server is a member.
pub(crate) async fn attend(
    channel: Channel,
    assignment: &Assignment,
    shared: &Arc<Shared>,
) -> Infallible {
    let mut wait = RETRY.0;
    while shared.connection() != Connection::Expelled {
        match call(channel.clone(), assignment, shared).await {
            Ok(()) => wait = RETRY.0,
            Err(status) if status.code() == Code::Unimplemented => {
                tracing::debug!("the controller does not support operators' questions");
                wait = RETRY_UNKNOWN;
            }
            Err(status) => {
                tracing::debug!(%status, "operators cannot query this memory server");
                wait = (wait * 2).min(RETRY.1);
            }
        }
        tokio::time::sleep(wait).await;
    }
    std::future::pending().await
}

/// One call, until the controller ends it.
async fn call(
    channel: Channel,
    assignment: &Assignment,
    shared: &Arc<Shared>,
) -> Result<(), Status> {
    // One more for the first message; a question that frees memory has two messages.
    let (answers, outgoing) = mpsc::channel(2 * QUESTIONS_MAX + 1);
    let member = proto::Attendance {
        node: assignment.node.0.into(),
        incarnation: assignment.incarnation,
        token: assignment.token.0.to_vec(),
    };
    let first = proto::AttendRequest { id: 0, body: Some(Said::Member(member)) };
    let _ = answers.try_send(first);
    let mut client = OperationsClient::new(channel);
    let mut questions = client.attend(ReceiverStream::new(outgoing)).await?.into_inner();
    let mut unconfirmed = VecDeque::new();
    while let Some(question) = questions.message().await? {
        let id = question.id;
        let answers = Some(answers.clone());
        if matches!(question.body, Some(Asked::Confirmation(_))) {
            if let Some(question) = confirmed(&mut unconfirmed, id) {
                shared.questions.put(question);
                shared.wake();
            }
            continue;
        }
        match parse(question) {
            Ok(ask @ Ask::Survey { frees: true, .. }) => {
                let mut question = Question { ask, id, answers };
                if question.send_ready() {
                    // The oldest has no operator any more: the controller asks fewer at once.
                    if unconfirmed.len() == QUESTIONS_MAX
                        && let Some(oldest) = unconfirmed.pop_front()
                    {
                        oldest.discard();
                    }
                    unconfirmed.push_back(question);
                }
            }
            Ok(ask) => {
                shared.questions.put(Question { ask, id, answers });
                shared.wake();
            }
            Err(rule) => {
                let ask = Ask::Statistics { space: Space(0) };
                Question { ask, id, answers }.answer(Answer::Failure(rule.to_owned()));
            }
        }
    }
    Ok(())
}

/// The question that the controller confirmed. Earlier ones have no operator any more.
fn confirmed(unconfirmed: &mut VecDeque<Question>, id: u64) -> Option<Question> {
    let place = unconfirmed.iter().position(|question| question.id == id)?;
    unconfirmed.remove(place)
}

fn parse(question: proto::AttendResponse) -> Result<Ask, &'static str> {
    let space =
        |number: u32| u16::try_from(number).map(Space).map_err(|_| "a space must fit 16 bits");
    match question.body {
        Some(Asked::Statistics(asked)) => Ok(Ask::Statistics { space: space(asked.space)? }),
        Some(Asked::Survey(asked)) => {
            let creators = match asked.creators {
                Some(creators) => {
                    let node =
                        u16::try_from(creators.node).map_err(|_| "a node id must fit 16 bits")?;
                    Some((NodeId(node), creators.first..=creators.last))
                }
                None => None,
            };
            Ok(Ask::Survey {
                space: space(asked.space)?,
                from_page: asked.from_page,
                limit: asked.limit,
                creators,
                frees: asked.frees,
            })
        }
        Some(Asked::Confirmation(_)) | None => {
            Err("this version of the memory server does not support the question")
        }
    }
}
