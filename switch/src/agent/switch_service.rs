//! The switch's own service: ports, drops, impairments, changes of the tables.

use std::time::Duration;

use bluebridge_p4::pipeline::{Counter, DropReason, Impairment, SwitchPort};
use bluebridge_p4::proto::bluebridge::switch::v1;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use v1::switch_server::Switch;

use super::executor::Executor;
use super::refusal::{Refusal, invalid};
use super::state::AgentState;
use crate::dataplane::PortStatus;

/// The service `bluebridge.switch.v1.Switch`.
#[derive(Debug)]
pub(super) struct SwitchService {
    pub(super) executor: Executor,
}

#[tonic::async_trait]
impl Switch for SwitchService {
    async fn list_ports(
        &self,
        _request: Request<v1::ListPortsRequest>,
    ) -> Result<Response<v1::ListPortsResponse>, Status> {
        Ok(Response::new(self.executor.run(AgentState::list_ports).await??))
    }

    async fn set_impairment(
        &self,
        request: Request<v1::SetImpairmentRequest>,
    ) -> Result<Response<v1::SetImpairmentResponse>, Status> {
        let request = request.into_inner();
        self.executor.run(move |state| state.set_impairment(&request)).await??;
        Ok(Response::new(v1::SetImpairmentResponse {}))
    }

    type WatchTablesStream = ReceiverStream<Result<v1::WatchTablesResponse, Status>>;

    async fn watch_tables(
        &self,
        _request: Request<v1::WatchTablesRequest>,
    ) -> Result<Response<Self::WatchTablesStream>, Status> {
        let changes = self.executor.run(|state| state.watch_changes()).await??;
        // One message waits for a client that does not read; later changes are in the next one.
        let (outbox, inbox) = mpsc::channel(1);
        tokio::spawn(pass_changes(changes, outbox));
        Ok(Response::new(ReceiverStream::new(inbox)))
    }
}

/// Passes on the count of changes until the client or the agent ends.
async fn pass_changes(
    mut changes: watch::Receiver<u64>,
    outbox: mpsc::Sender<Result<v1::WatchTablesResponse, Status>>,
) {
    loop {
        let change_count = *changes.borrow_and_update();
        if outbox.send(Ok(v1::WatchTablesResponse { change_count })).await.is_err() {
            return;
        }
        tokio::select! {
            changed = changes.changed() => if changed.is_err() {
                return;
            },
            () = outbox.closed() => return,
        }
    }
}

impl AgentState {
    fn list_ports(&mut self) -> Result<v1::ListPortsResponse, Refusal> {
        let drops = self.plane.drops()?;
        Ok(v1::ListPortsResponse {
            data_plane: self.plane.name().to_owned(),
            ports: self.plane.ports()?.into_iter().map(port).collect(),
            drops: DropReason::ALL
                .into_iter()
                .map(|reason| v1::Drop {
                    reason: reason.name().to_owned(),
                    frames: drops.of(reason),
                })
                .collect(),
            packet_ins_lost: self.lost_packet_ins()?,
        })
    }

    fn set_impairment(&mut self, request: &v1::SetImpairmentRequest) -> Result<(), Refusal> {
        let port = u16::try_from(request.port).map(SwitchPort);
        let port = port.map_err(|_| invalid(format!("the switch has no port {}", request.port)))?;
        let wanted = request.impairment.unwrap_or_default();
        let delay = wanted.delay.map_or(Ok(Duration::ZERO), Duration::try_from);
        let impairment = Impairment {
            seed: wanted.seed,
            loss: wanted.loss,
            duplicate: wanted.duplicate,
            reorder: wanted.reorder,
            corrupt: wanted.corrupt,
            delay: delay.map_err(|_| invalid("the delay is negative or too long"))?,
        };
        self.plane.set_impairment(port, impairment)?;
        tracing::info!(port = port.0, ?impairment, "an operator set the impairment of a port");
        Ok(())
    }
}

fn port(status: PortStatus) -> v1::Port {
    v1::Port {
        number: status.port.0.into(),
        name: status.name,
        mac: status.mac.0.to_vec(),
        mtu: status.mtu,
        rx: Some(counter(status.rx)),
        tx: Some(counter(status.tx)),
        impaired: Some(v1::ImpairmentCounters {
            lost: status.impaired.lost,
            duplicated: status.impaired.duplicated,
            reordered: status.impaired.reordered,
            corrupted: status.impaired.corrupted,
            delayed: status.impaired.delayed,
        }),
    }
}

const fn counter(counter: Counter) -> v1::Counter {
    v1::Counter { packets: counter.packets, bytes: counter.bytes }
}
