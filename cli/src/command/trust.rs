//! TLS for joining: how an endpoint and the controller authenticate each other.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::SystemTime;

use bluebridge::JoinError;
use bluebridge_northbound::MembershipError;
use bluebridge_northbound::environment::{
    TLS_CERTIFICATE_VARIABLE, TLS_KEY_VARIABLE, TLS_NAME_VARIABLE, TLS_ROOT_VARIABLE,
};
use bluebridge_northbound::tls::{EndpointFiles, TlsFileError, defect_of_certificate};
use bluebridge_rack::control::ControlError;
use clap::Args;
use tonic::transport::ClientTlsConfig;

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
    pub(super) fn config(
        &self,
        controller: SocketAddr,
    ) -> Result<Option<ClientTlsConfig>, TlsFileError> {
        let Some(files) = self.files() else { return Ok(None) };
        let name = self.tls_name.clone().unwrap_or_else(|| controller.ip().to_string());
        files.config(Some(&name)).map(Some)
    }

    fn files(&self) -> Option<EndpointFiles<'_>> {
        let identity = self.tls_certificate.as_deref().zip(self.tls_key.as_deref());
        self.tls_root.as_deref().map(|root| EndpointFiles { root, identity })
    }

    /// Adds the files to the error of a connection that they, or those of the controller, made fail.
    pub(super) fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let Some(files) = self.files() else { return error };
        let membership = error.chain().find_map(|cause| {
            let join = cause.downcast_ref::<JoinError>().and_then(|error| match error {
                JoinError::Membership(error) => Some(error),
                _ => None,
            });
            let control = cause.downcast_ref::<ControlError>().and_then(|error| match error {
                ControlError::Connection(error) => Some(&**error),
                _ => None,
            });
            cause.downcast_ref::<MembershipError>().or(join).or(control)
        });
        if !matches!(
            membership,
            Some(MembershipError::Untrusted { .. } | MembershipError::Closed { .. })
        ) {
            return error;
        }
        let mut words = format!("with the TLS root {}", files.root.display());
        if let Some((certificate, _)) = files.identity {
            words = format!("{words} and the certificate {}", certificate.display());
            if let Some(defect) = defect_of_certificate(certificate, SystemTime::now()) {
                words = format!("{words}, which {defect}");
            }
        }
        error.context(words)
    }
}

/// The controller's URI for gRPC.
pub(super) fn controller_uri(controller: SocketAddr, tls: Option<&ClientTlsConfig>) -> String {
    let scheme = if tls.is_some() { "https" } else { "http" };
    format!("{scheme}://{controller}")
}
