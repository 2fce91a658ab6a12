//! The files of TLS: each is checked when it is read, so that an error names the file that is wrong.

use std::error::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

/// The ends of the PEM lines that begin a certificate, and a private key of any kind (RFC 7468).
const CERTIFICATE: &str = "CERTIFICATE-----";
const KEY: &str = "PRIVATE KEY-----";
const ENCRYPTED: &str = "ENCRYPTED PRIVATE KEY-----";

/// Why files cannot be used for TLS. Who configured this side must correct them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsFileError {
    /// A certificate or key is damaged.
    #[error("{} contains no {what} that can be read ({reason}); create the file again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What it should contain.
        what: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// A private key is protected by a passphrase.
    #[error(
        "the private key in {0} is encrypted; use a decrypted copy (`openssl pkey -in {0} -out FILE`)",
        path.display()
    )]
    Encrypted {
        /// The file.
        path: PathBuf,
    },
    /// Certificate and private key are not a pair.
    #[error(
        "{} is not the private key of the certificate in {}; specify the two that were created together",
        key.display(), certificate.display()
    )]
    Mismatch {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
    },
    /// The name of the controller's certificate is not a name.
    #[error(
        "{0:?} is neither a DNS name nor an address; specify the name in the controller's certificate"
    )]
    Name(String),
    /// A file contains no object of the required kind.
    #[error(
        "{} contains no PEM block -----BEGIN {label}; specify a {what} in PEM format", path.display()
    )]
    NoBlock {
        /// The file.
        path: PathBuf,
        /// The end of the line that is missing.
        label: &'static str,
        /// What it should contain.
        what: &'static str,
    },
    /// A file cannot be read.
    #[error("cannot read {}: {source}; {}", path.display(), remedy(source))]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The TLS library accepts the files, but not together.
    #[error("{files} cannot be used for TLS: {reason}")]
    Unusable {
        /// The files.
        files: String,
        /// The TLS library's reason.
        reason: String,
    },
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "run as a user who may read it, or change its mode",
        _ => "correct the path",
    }
}

/// The files of an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct EndpointFiles<'a> {
    /// The root of the controller's certificate.
    pub root: &'a Path,
    /// The endpoint's certificate and its private key.
    pub identity: Option<(&'a Path, &'a Path)>,
}

impl EndpointFiles<'_> {
    /// The configuration with which an endpoint joins; `name` is the one in the controller's certificate.
    ///
    /// # Errors
    /// [`TlsFileError`].
    pub fn config(&self, name: Option<&str>) -> Result<ClientTlsConfig, TlsFileError> {
        let root = Certificate::from_pem(read_certificates(self.root)?);
        let mut config = ClientTlsConfig::new().ca_certificate(root);
        if let Some(name) = name {
            ServerName::try_from(name).map_err(|_| TlsFileError::Name(name.to_owned()))?;
            config = config.domain_name(name);
        }
        if let Some((certificate, key)) = self.identity {
            config = config
                .identity(Identity::from_pem(read_certificates(certificate)?, read_key(key)?));
        }
        // Otherwise files that do not match would be reported as an invalid address.
        let tried = Endpoint::from_static("https://localhost").tls_config(config.clone());
        tried.map_err(|error| unusable(self.identity, &error))?;
        Ok(config)
    }
}

/// The error of the TLS library about files that were read: which of them do not belong together.
#[must_use]
pub fn unusable(identity: Option<(&Path, &Path)>, error: &(dyn Error + 'static)) -> TlsFileError {
    // The outer errors only say that something failed.
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    let reason = cause.to_string();
    match identity {
        Some((certificate, key)) if reason.contains("KeyMismatch") => {
            TlsFileError::Mismatch { certificate: certificate.to_owned(), key: key.to_owned() }
        }
        Some((certificate, key)) => {
            let files = format!("{} with {}", certificate.display(), key.display());
            TlsFileError::Unusable { files, reason }
        }
        None => TlsFileError::Unusable { files: "the root".to_owned(), reason },
    }
}

/// Reads a PEM file that must contain a certificate: a root without one would trust no peer.
///
/// # Errors
/// [`TlsFileError`].
pub fn read_certificates(path: &Path) -> Result<Vec<u8>, TlsFileError> {
    const WHAT: &str = "certificate";
    let bytes = read(path, CERTIFICATE, WHAT)?;
    let damaged =
        |reason: String| TlsFileError::Damaged { path: path.to_owned(), what: WHAT, reason };
    let found: Vec<CertificateDer<'_>> = CertificateDer::pem_slice_iter(&bytes)
        .collect::<Result<_, _>>()
        .map_err(|error| damaged(error.to_string()))?;
    // A bundle of roots may contain one that this library does not understand.
    let mut reason = "it is empty".to_owned();
    for certificate in &found {
        match webpki::anchor_from_trusted_cert(certificate) {
            Ok(_) => return Ok(bytes),
            Err(error) => reason = error.to_string(),
        }
    }
    Err(damaged(reason))
}

/// Reads a PEM file that must contain a private key.
///
/// # Errors
/// [`TlsFileError`].
pub fn read_key(path: &Path) -> Result<Vec<u8>, TlsFileError> {
    const WHAT: &str = "private key";
    let bytes = read(path, KEY, WHAT)?;
    match PrivateKeyDer::from_pem_slice(&bytes) {
        Ok(_) => Ok(bytes),
        Err(_) if has_block(&bytes, ENCRYPTED) => {
            Err(TlsFileError::Encrypted { path: path.to_owned() })
        }
        Err(error) => {
            let (path, reason) = (path.to_owned(), error.to_string());
            Err(TlsFileError::Damaged { path, what: WHAT, reason })
        }
    }
}

fn read(path: &Path, label: &'static str, what: &'static str) -> Result<Vec<u8>, TlsFileError> {
    let bytes =
        fs::read(path).map_err(|source| TlsFileError::Read { path: path.to_owned(), source })?;
    match has_block(&bytes, label) {
        true => Ok(bytes),
        false => Err(TlsFileError::NoBlock { path: path.to_owned(), label, what }),
    }
}

fn has_block(bytes: &[u8], label: &str) -> bool {
    let text = String::from_utf8_lossy(bytes);
    text.lines().any(|line| line.starts_with("-----BEGIN ") && line.trim_end().ends_with(label))
}

/// Why every peer refuses the certificate of a file at this time, such as "expired 3 days ago"; `None` if there is
/// no such reason in the certificate itself, or it cannot be read.
#[must_use]
pub fn defect_of_certificate(path: &Path, now: SystemTime) -> Option<String> {
    let bytes = fs::read(path).ok()?;
    let certificate = CertificateDer::from_pem_slice(&bytes).ok()?;
    let certificate = webpki::EndEntityCert::try_from(&certificate).ok()?;
    let now = now.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    // It is checked by itself before its issuer, which is not given.
    let checked = certificate.verify_for_usage(
        &[],
        &[],
        &[],
        UnixTime::since_unix_epoch(now),
        webpki::KeyUsage::server_auth(),
        None,
        None,
    );
    match checked.err()? {
        webpki::Error::CertExpired { not_after, .. } => {
            let past = now.saturating_sub(Duration::from_secs(not_after.as_secs()));
            Some(format!("expired {} ago", days(past)))
        }
        webpki::Error::CertNotValidYet { not_before, .. } => {
            let left = Duration::from_secs(not_before.as_secs()).saturating_sub(now);
            Some(format!("is not valid for another {}", days(left)))
        }
        webpki::Error::CaUsedAsEndEntity => {
            Some("is that of an authority (CA:TRUE), not one that an authority issued".to_owned())
        }
        _ => None,
    }
}

fn days(time: Duration) -> String {
    const HOUR: u64 = 3600;
    match time.as_secs() / HOUR {
        hours @ 0..48 => format!("{hours} h"),
        hours => format!("{} days", hours / 24),
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_testkit::Scratch;
    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    #[test]
    fn a_certificate_that_every_peer_refuses_is_described() {
        let scratch = Scratch::new("tls-defect");
        let path = scratch.file("certificate.pem");
        let write = |is_ca: bool| {
            let mut params = CertificateParams::new(["x".to_owned()]).unwrap();
            params.not_before = rcgen::date_time_ymd(2020, 1, 1);
            params.not_after = rcgen::date_time_ymd(2030, 1, 1);
            if is_ca {
                params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            }
            let text = params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem();
            fs::write(&path, text).unwrap();
        };
        let at = |days: u32| SystemTime::UNIX_EPOCH + days * DAY;
        let (begin, end) = (18_262, 21_915);
        write(false);
        let defect = |now| defect_of_certificate(&path, now);
        assert_eq!(defect(at(begin + 1)), None);
        assert_eq!(defect(at(end + 9)), Some("expired 9 days ago".to_owned()));
        assert_eq!(defect(at(begin) - DAY / 2), Some("is not valid for another 12 h".to_owned()));
        write(true);
        assert!(defect(at(begin + 1)).unwrap().contains("CA:TRUE"));
    }
}
