//! Which controller may write.
//!
//! OpenFlow lets the controller with the newest generation id become the primary ("master"), and forgets who
//! it was when it leaves. The pipeline has a stricter rule: the greatest election id that ever was primary
//! keeps the switch. So the primary stores its election id in the switch, in a flow that no frame reaches.
//! Whoever finds one there that is not below its own is fenced. A controller reads the record before it becomes
//! the primary, so that it does not disturb a right one, and again afterwards, because two may do this at once:
//! from then on only one of them can write.

use bluebridge_openflow::{
    Body, FlowStatsRequest, GROUP_ANY, MultipartPart, MultipartRequest, Role, RoleRequest, port,
};

use super::channel::Channel;
use super::flow::{Flow, Steps};
use super::layout::{PRIMARY_RECORD, RECORDS, record as record_flow};
use crate::driver::DriverError;
use crate::store::ElectionId;

/// What a switch reports as generation id before any controller set one (Open vSwitch).
const NO_GENERATION: u64 = u64::MAX;

/// Why this controller cannot write any more: another one's record is in the switch, or its role was lost for
/// another reason. Trying again in the first case could take the switch back, for example from a controller that was
/// started with a copy of this one's store.
pub(super) async fn lost(channel: &mut Channel, ours: ElectionId) -> DriverError {
    match recorded(channel).await {
        Ok(Some(theirs)) if theirs != ours => DriverError::Fenced { ours, theirs },
        _ => DriverError::Lost("another controller became the primary".to_owned()),
    }
}

/// Becomes the primary, unless the switch belongs to a controller with a greater election id.
pub(super) async fn become_primary(
    channel: &mut Channel,
    ours: ElectionId,
) -> Result<(), DriverError> {
    fence(channel, ours).await?;
    let present = role(channel, RoleRequest { role: Role::NoChange, generation_id: 0 }).await?;
    let generation_id = match present.generation_id {
        NO_GENERATION => 1,
        generation => generation.wrapping_add(1),
    };
    role(channel, RoleRequest { role: Role::Primary, generation_id }).await?;
    if let Err(error) = fence(channel, ours).await {
        // Only a courtesy: the other one takes the role anyway.
        let back = RoleRequest { role: Role::Secondary, generation_id };
        drop(role(channel, back).await);
        return Err(error);
    }
    record(channel, ours).await
}

/// Checks that this controller is still the primary, and that the switch has its record.
pub(super) async fn check(channel: &mut Channel, ours: ElectionId) -> Result<(), DriverError> {
    let present = role(channel, RoleRequest { role: Role::NoChange, generation_id: 0 }).await?;
    if present.role != Role::Primary {
        return Err(lost(channel, ours).await);
    }
    if recorded(channel).await? != Some(ours) {
        // Only the primary writes, or a program that takes no part in the election.
        tracing::warn!("the switch had lost the record of its primary; it was written again");
        record(channel, ours).await?;
    }
    Ok(())
}

/// Stores this controller's election id in the switch.
pub(super) async fn record(channel: &mut Channel, ours: ElectionId) -> Result<(), DriverError> {
    let flow = record_flow(PRIMARY_RECORD, ours.low, ours.high);
    match channel.change([flow.add().into()]).await?.into_values().next() {
        None => Ok(()),
        // Not `lost`, which reads what could not be written here.
        Some(error) if error.is_not_primary() => {
            Err(DriverError::Lost("another controller became the primary".to_owned()))
        }
        Some(error) => Err(DriverError::Refused {
            what: "the record of the primary",
            reason: error.to_string(),
        }),
    }
}

/// Finds a record by the conditions of its flow.
pub(super) async fn find_record(
    channel: &mut Channel,
    record: &Flow,
) -> Result<Option<Flow>, DriverError> {
    let request = MultipartRequest::Flows(FlowStatsRequest {
        table: RECORDS,
        out_port: port::ANY,
        out_group: GROUP_ANY,
        cookie: 0,
        cookie_mask: 0,
        fields: Vec::new(),
    });
    let parts = channel.multipart("reading the records", request).await?;
    let flows = parts.iter().flat_map(|part| match part {
        MultipartPart::Flows(flows) => flows.as_slice(),
        _ => &[],
    });
    Ok(flows.filter_map(Flow::read).find(|flow| flow.key() == record.key()))
}

/// The election id that is stored in the switch.
async fn recorded(channel: &mut Channel) -> Result<Option<ElectionId>, DriverError> {
    let found = find_record(channel, &record_flow(PRIMARY_RECORD, 0, 0)).await?;
    Ok(found.and_then(|flow| match flow.steps {
        Steps::Record(high) => Some(ElectionId { high, low: flow.cookie }),
        _ => None,
    }))
}

/// Refuses an election id that is not above the stored one. An equal one belongs to a controller with a copy of this
/// one's store, because no controller uses an id twice.
async fn fence(channel: &mut Channel, ours: ElectionId) -> Result<(), DriverError> {
    match recorded(channel).await? {
        Some(theirs) if theirs >= ours => Err(DriverError::Fenced { ours, theirs }),
        _ => Ok(()),
    }
}

async fn role(channel: &mut Channel, request: RoleRequest) -> Result<RoleRequest, DriverError> {
    match channel.try_request("the role", Body::RoleRequest(request)).await? {
        Ok(Body::RoleReply(reply)) => Ok(reply),
        Ok(_) => Err(DriverError::Lost("it did not report its role".to_owned())),
        // Another controller took the role between the two requests: the next try sees its record.
        Err(error) if error.is_stale_role() => Err(DriverError::Lost(error.to_string())),
        Err(error) => Err(DriverError::Refused { what: "the role", reason: error.to_string() }),
    }
}
