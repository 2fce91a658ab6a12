//! TLS for joining: how an endpoint and the controller authenticate each other.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use bluebridge_northbound::environment::{
    TLS_CERTIFICATE_VARIABLE, TLS_KEY_VARIABLE, TLS_NAME_VARIABLE, TLS_ROOT_VARIABLE,
};
use clap::Args;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use crate::exit::{InputError, UsageError};

/// The TLS options; without a root, joining uses no TLS.
#[derive(Clone, Debug, Args)]
pub(super) struct Trust {
    /// Join with TLS: the root (PEM) of the controller's certificate
    #[arg(long, env = TLS_ROOT_VARIABLE, value_name = "FILE")]
    tls_root: Option<PathBuf>,
    /// The name in the controller's certificate; the default is its address
    #[arg(long, env = TLS_NAME_VARIABLE, value_name = "NAME", requires = "tls_root")]
    tls_name: Option<String>,
    /// This endpoint's certificate chain (PEM), if the controller requires one
    #[arg(long, env = TLS_CERTIFICATE_VARIABLE, value_name = "FILE", requires_all = ["tls_root", "tls_key"])]
    tls_certificate: Option<PathBuf>,
    /// The private key of this endpoint's certificate (PEM)
    #[arg(long, env = TLS_KEY_VARIABLE, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
}

impl Trust {
    /// The TLS configuration, if TLS is requested.
    pub(super) fn config(&self, controller: SocketAddr) -> anyhow::Result<Option<ClientTlsConfig>> {
        let Some(root) = &self.tls_root else { return Ok(None) };
        let name = self.tls_name.clone().unwrap_or_else(|| controller.ip().to_string());
        let config = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(read(root, CERTIFICATE)?))
            .domain_name(name);
        let config = match self.tls_certificate.as_ref().zip(self.tls_key.as_ref()) {
            Some((certificate, key)) => config
                .identity(Identity::from_pem(read(certificate, CERTIFICATE)?, read(key, KEY)?)),
            None => config,
        };
        // Without this check, files that do not match would be reported as an invalid address.
        let tried = Endpoint::from_static("https://localhost").tls_config(config.clone());
        tried.map_err(|error| {
            UsageError(format!("the TLS files cannot be used together: {}", innermost(&error)))
        })?;
        Ok(Some(config))
    }
}

/// The contents of the PEM lines that begin and end a certificate, and a private key of any kind (RFC 7468).
const CERTIFICATE: &str = "CERTIFICATE-----";
const KEY: &str = "PRIVATE KEY-----";

fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// The controller's URI for gRPC.
pub(super) fn controller_uri(controller: SocketAddr, tls: Option<&ClientTlsConfig>) -> String {
    let scheme = if tls.is_some() { "https" } else { "http" };
    format!("{scheme}://{controller}")
}

/// Reads a PEM file that must contain a certain kind of object: a root without a certificate would trust no peer.
fn read(path: &Path, label: &str) -> anyhow::Result<Vec<u8>> {
    let bytes = fs::read(path).map_err(|source| InputError { path: path.to_owned(), source })?;
    let text = String::from_utf8_lossy(&bytes);
    if text.lines().any(|line| line.starts_with("-----BEGIN ") && line.trim_end().ends_with(label))
    {
        return Ok(bytes);
    }
    let words = format!("{} contains no PEM block -----BEGIN {label}", path.display());
    Err(UsageError(words).into())
}
