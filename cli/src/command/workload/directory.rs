//! `bluebridge workload directory`: a directory service, in the foreground.

use std::net::{SocketAddr, UdpSocket};

use anyhow::Context;
use bluebridge_bench::directory::Directory;
use bluebridge_rack::readiness;
use clap::Args;

use super::Waiting;
use crate::command::interrupt;
use crate::exit::Exit;

/// Serve as the directory of `crud --directory`, in the foreground: the traditional design, for comparison.
#[derive(Debug, Args)]
pub(in crate::command) struct Serve {
    /// The address and UDP port
    #[arg(long, value_name = "ADDRESS")]
    listen: SocketAddr,
    /// The most pages that it stores
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pages: u32,
    #[command(flatten)]
    waiting: Waiting,
}

pub(super) fn run(asked: Serve) -> anyhow::Result<Exit> {
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let listen = asked.listen;
    let socket = UdpSocket::bind(listen).with_context(|| format!("cannot listen at {listen}"))?;
    let mut directory = Directory::new(asked.pages as usize);
    readiness::report_ready();
    directory
        .serve(&socket, asked.waiting.spin(), || cancel.is_cancelled())
        .with_context(|| format!("cannot serve at {listen}"))?;
    Ok(Exit::Ok)
}
