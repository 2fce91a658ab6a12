//! The thread that owns the agent's state and the data plane.
//!
//! A thread instead of a mutex: a data plane may make system calls, which must not delay the
//! tasks that serve the network; and requests must be executed in their order of arrival, because
//! arbitration needs it.

use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use super::state::AgentState;
use crate::dataplane::DataPlane;

/// How many requests may wait for the thread.
const JOBS_MAX: usize = 256;

/// How long a request waits for its execution.
const JOB_DEADLINE: Duration = Duration::from_secs(30);

enum Job {
    Run(Box<dyn FnOnce(&mut AgentState) + Send>),
    Stop,
}

/// Sends requests to the thread.
#[derive(Clone, Debug)]
pub(super) struct Executor {
    jobs: mpsc::Sender<Job>,
}

/// The thread, to be joined after [`Executor::stop`].
#[derive(Debug)]
pub(super) struct Thread(std::thread::JoinHandle<Box<dyn DataPlane>>);

impl Executor {
    /// Starts the thread.
    pub(super) fn start(mut state: AgentState) -> std::io::Result<(Self, Thread)> {
        let (jobs, mut queue) = mpsc::channel::<Job>(JOBS_MAX);
        let thread = std::thread::Builder::new().name("p4runtime".to_owned()).spawn(move || {
            while let Some(Job::Run(work)) = queue.blocking_recv() {
                work(&mut state);
            }
            state.into_plane()
        })?;
        Ok((Self { jobs }, Thread(thread)))
    }

    /// Executes a request on the state, after all earlier requests.
    ///
    /// A request is executed even if its caller is gone.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut AgentState) -> T + Send + 'static,
    ) -> Result<T, Status> {
        let (sender, receiver) = oneshot::channel();
        let job = Job::Run(Box::new(move |state| {
            let _ = sender.send(work(state));
        }));
        let wait = async {
            self.jobs.send(job).await.map_err(|_| gone())?;
            receiver.await.map_err(|_| gone())
        };
        tokio::time::timeout(JOB_DEADLINE, wait)
            .await
            .map_err(|_| Status::deadline_exceeded("the switch is busy; try again"))?
    }

    /// Ends the thread after all earlier requests; remaining connections get an error
    /// afterwards.
    pub(super) async fn stop(self) {
        let _ = tokio::time::timeout(JOB_DEADLINE, self.jobs.send(Job::Stop)).await;
    }
}

impl Thread {
    /// Waits for the thread and returns the data plane; `None` if the thread panicked.
    pub(super) async fn join(self) -> Option<Box<dyn DataPlane>> {
        tokio::task::spawn_blocking(move || self.0.join().ok()).await.ok().flatten()
    }
}

fn gone() -> Status {
    Status::unavailable("the switch is shutting down")
}
