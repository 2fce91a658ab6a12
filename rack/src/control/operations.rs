//! Operators' requests to memory servers, through the controller.

use std::time::Duration;

use bluebridge_northbound::proto;
use proto::operations_client::OperationsClient;

use super::{Contact, ControlError, Peer, call_within};

/// The most allocations in one response.
pub const ALLOCATIONS_MAX: u32 = 1024;

/// Some allocations of a space on a memory server.
///
/// # Errors
/// [`ControlError`].
pub fn allocations(
    controller: &Contact,
    request: proto::AllocationsRequest,
    patience: Duration,
) -> Result<proto::AllocationsResponse, ControlError> {
    call_within(patience, Peer::Controller, controller, async |channel| {
        let mut operations = OperationsClient::new(channel);
        operations.allocations(request).await.map(tonic::Response::into_inner)
    })
}

/// Frees some allocations of a space on a memory server.
///
/// # Errors
/// [`ControlError`]; without a response, some may be freed.
pub fn purge(
    controller: &Contact,
    request: proto::PurgeRequest,
    patience: Duration,
) -> Result<proto::PurgeResponse, ControlError> {
    call_within(patience, Peer::Controller, controller, async |channel| {
        let mut operations = OperationsClient::new(channel);
        operations.purge(request).await.map(tonic::Response::into_inner)
    })
}

/// A memory server's usage, and what it refused and dropped.
///
/// # Errors
/// [`ControlError`].
pub fn statistics(
    controller: &Contact,
    request: proto::StatisticsRequest,
    patience: Duration,
) -> Result<proto::StatisticsResponse, ControlError> {
    call_within(patience, Peer::Controller, controller, async |channel| {
        let mut operations = OperationsClient::new(channel);
        operations.statistics(request).await.map(tonic::Response::into_inner)
    })
}

/// Moves memory to another memory server.
///
/// # Errors
/// [`ControlError`]; without a response, it may move.
pub fn migrate(
    controller: &Contact,
    request: proto::MigrateRequest,
    patience: Duration,
) -> Result<proto::MigrateResponse, ControlError> {
    call_within(patience, Peer::Controller, controller, async |channel| {
        let mut operations = OperationsClient::new(channel);
        operations.migrate(request).await.map(tonic::Response::into_inner)
    })
}

/// Ends a migration.
///
/// # Errors
/// [`ControlError`].
pub fn cancel_migration(
    controller: &Contact,
    request: proto::CancelMigrationRequest,
    patience: Duration,
) -> Result<(), ControlError> {
    call_within(patience, Peer::Controller, controller, async |channel| {
        let mut operations = OperationsClient::new(channel);
        operations.cancel_migration(request).await.map(|_| ())
    })
}

/// Drains a memory server, or ends that.
///
/// # Errors
/// [`ControlError`]; without a response, it may be done.
pub fn drain(
    controller: &Contact,
    request: proto::DrainRequest,
    patience: Duration,
) -> Result<proto::DrainResponse, ControlError> {
    call_within(patience, Peer::Controller, controller, async |channel| {
        let mut operations = OperationsClient::new(channel);
        operations.drain(request).await.map(tonic::Response::into_inner)
    })
}

/// Every memory server that is drained.
///
/// # Errors
/// [`ControlError`].
pub fn drains(controller: &Contact, patience: Duration) -> Result<Vec<proto::Drain>, ControlError> {
    call_within(patience, Peer::Controller, controller, async |channel| {
        let mut operations = OperationsClient::new(channel);
        Ok(operations.drains(proto::DrainsRequest {}).await?.into_inner().drains)
    })
}

/// Lets memory move by itself or no more, counts what would move, and shows the state.
///
/// # Errors
/// [`ControlError`]; without a response, it may be done.
pub fn rebalance(
    controller: &Contact,
    request: proto::RebalanceRequest,
    patience: Duration,
) -> Result<proto::RebalanceResponse, ControlError> {
    call_within(patience, Peer::Controller, controller, async |channel| {
        let mut operations = OperationsClient::new(channel);
        operations.rebalance(request).await.map(tonic::Response::into_inner)
    })
}

/// Every open migration and the last closed ones.
///
/// # Errors
/// [`ControlError`].
pub fn migrations(
    controller: &Contact,
    patience: Duration,
) -> Result<Vec<proto::Migration>, ControlError> {
    call_within(patience, Peer::Controller, controller, async |channel| {
        let mut operations = OperationsClient::new(channel);
        let response = operations.migrations(proto::MigrationsRequest {}).await?;
        Ok(response.into_inner().migrations)
    })
}
