//! The generated messages and service; `proto/` documents them.
#![allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::cast_possible_truncation,
    clippy::use_self,
    reason = "generated code"
)]

tonic::include_proto!("bluebridge.v1");
