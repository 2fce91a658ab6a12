//! The P4Runtime service: passes requests from the network to the agent's thread, and responses back.

use bluebridge_p4::proto::p4::v1;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use v1::p4_runtime_server::P4Runtime;

use super::arbitration::{Outbox, STREAM_QUEUE, StreamId};
use super::executor::Executor;
use super::refusal::Refusal;

/// The version of P4Runtime that this server speaks.
const API_VERSION: &str = "1.4.0";

/// The service `p4.v1.P4Runtime`.
#[derive(Debug)]
pub(super) struct P4RuntimeService {
    pub(super) executor: Executor,
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl P4Runtime for P4RuntimeService {
    type ReadStream = tokio_stream::Iter<std::vec::IntoIter<Result<v1::ReadResponse, Status>>>;
    type StreamChannelStream = ReceiverStream<Result<v1::StreamMessageResponse, Status>>;

    async fn write(&self, request: Request<v1::WriteRequest>) -> Answer<v1::WriteResponse> {
        let request = request.into_inner();
        let written = self.executor.run(move |state| {
            let written = state.write(&request);
            state.note_change();
            written
        });
        written.await??;
        Ok(Response::new(v1::WriteResponse {}))
    }

    async fn read(&self, request: Request<v1::ReadRequest>) -> Answer<Self::ReadStream> {
        let request = request.into_inner();
        let responses = self.executor.run(move |state| state.read(&request)).await??;
        let responses: Vec<_> = responses.into_iter().map(Ok).collect();
        Ok(Response::new(tokio_stream::iter(responses)))
    }

    async fn set_forwarding_pipeline_config(
        &self,
        request: Request<v1::SetForwardingPipelineConfigRequest>,
    ) -> Answer<v1::SetForwardingPipelineConfigResponse> {
        let request = request.into_inner();
        let set = self.executor.run(move |state| {
            let set = state.set_pipeline(request);
            state.note_change();
            set
        });
        set.await??;
        Ok(Response::new(v1::SetForwardingPipelineConfigResponse {}))
    }

    async fn get_forwarding_pipeline_config(
        &self,
        request: Request<v1::GetForwardingPipelineConfigRequest>,
    ) -> Answer<v1::GetForwardingPipelineConfigResponse> {
        let request = request.into_inner();
        let response = self.executor.run(move |state| state.pipeline_config(&request)).await??;
        Ok(Response::new(response))
    }

    async fn stream_channel(
        &self,
        request: Request<Streaming<v1::StreamMessageRequest>>,
    ) -> Answer<Self::StreamChannelStream> {
        let (outbox, inbox) = mpsc::channel(STREAM_QUEUE);
        let (end, ended) = oneshot::channel();
        let opened = outbox.clone();
        let stream = self.executor.run(move |state| state.arbitration.open(opened, end)).await??;
        let ends = Ends { outbox, ended };
        tokio::spawn(listen(self.executor.clone(), stream, request.into_inner(), ends));
        Ok(Response::new(ReceiverStream::new(inbox)))
    }

    async fn capabilities(
        &self,
        request: Request<v1::CapabilitiesRequest>,
    ) -> Answer<v1::CapabilitiesResponse> {
        let device_id = request.into_inner().device_id;
        self.executor.run(move |state| state.arbitration.check_device(device_id, true)).await??;
        Ok(Response::new(v1::CapabilitiesResponse {
            p4runtime_api_version: API_VERSION.to_owned(),
            experimental: None,
        }))
    }
}

/// What ends a stream, other than its client's messages.
struct Ends {
    outbox: Outbox,
    /// Resolves when the agent has ended the stream.
    ended: oneshot::Receiver<()>,
}

impl Ends {
    /// Resolves when the client no longer accepts messages, or the agent ended the stream.
    async fn closed(&mut self) {
        tokio::select! {
            () = self.outbox.closed() => {}
            _ = &mut self.ended => {}
        }
    }
}

/// Passes on a client's messages until the client ends its stream, or breaks a rule that ends it.
async fn listen(
    executor: Executor,
    stream: StreamId,
    mut requests: Streaming<v1::StreamMessageRequest>,
    mut ends: Ends,
) {
    loop {
        let message = tokio::select! {
            message = requests.message() => message,
            () = ends.closed() => break,
        };
        let Ok(Some(message)) = message else { break };
        let done = executor.run(move |state| state.handle_message(stream, message)).await;
        if let Err(status) =
            done.and_then(|handled: Result<(), Refusal>| handled.map_err(Status::from))
        {
            // If the queue is full, the stream ends without the status: its client does not read anyway.
            let _ = ends.outbox.try_send(Err(status));
            break;
        }
    }
    let _ = executor.run(move |state| state.arbitration.close(stream)).await;
}
