//! Why a request was refused, and its gRPC status.

use bluebridge_p4::entry::ConversionError;
use bluebridge_p4::proto::{google::rpc, p4::v1};
use prost::Message as _;
use tonic::{Code, Status};

use crate::dataplane::{ImpairmentError, PlaneError, PortError, TableError};

/// The space of codes in `p4.v1.Error.code`; this switch has no codes of its own.
pub(super) const ERROR_SPACE: &str = "bluebridge";

/// The most bytes of encoded error details: clients built on grpc-core refuse responses with more
/// than 8 KiB of metadata, and would then not get the results.
pub(super) const DETAILS_BYTES_MAX: usize = 7 * 1024;

/// How many failed updates a status names if their details do not fit.
const NAMED_MAX: usize = 40;

/// Why a request, or one update of a batch, was refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    /// The caller's message is not an entity of this pipeline.
    #[error(transparent)]
    Conversion(#[from] ConversionError),
    /// The data plane refused an impairment.
    #[error(transparent)]
    Impairment(#[from] ImpairmentError),
    /// The data plane failed.
    #[error(transparent)]
    Plane(#[from] PlaneError),
    /// The data plane refused a packet.
    #[error(transparent)]
    Port(#[from] PortError),
    /// The request breaks a rule of P4Runtime.
    #[error("{1}")]
    Request(Code, String),
    /// The data plane refused an entry or group.
    #[error(transparent)]
    Table(#[from] TableError),
}

impl Refusal {
    /// The canonical code, as the specification prescribes it for the case.
    pub(super) fn code(&self) -> Code {
        match self {
            Self::Conversion(error) => error.code(),
            Self::Impairment(ImpairmentError::Unsupported(_)) => Code::Unimplemented,
            Self::Impairment(ImpairmentError::Plane(error))
            | Self::Plane(error)
            | Self::Port(PortError::Plane(error))
            | Self::Table(TableError::Plane(error)) => plane_code(error),
            Self::Impairment(_) | Self::Port(_) => Code::InvalidArgument,
            Self::Request(code, _) => *code,
            Self::Table(error) => match error {
                TableError::Exists(_) => Code::AlreadyExists,
                TableError::NotFound(_) | TableError::UnknownGroup(_) => Code::NotFound,
                TableError::Full(_) => Code::ResourceExhausted,
                TableError::Unsupported { .. } => Code::Unimplemented,
                _ => Code::InvalidArgument,
            },
        }
    }
}

fn plane_code(error: &PlaneError) -> Code {
    match error {
        PlaneError::Gone => Code::Unavailable,
        PlaneError::NeedsRoot(_) => Code::PermissionDenied,
        PlaneError::NoEbpf => Code::Unimplemented,
        _ => Code::Internal,
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        Self::new(refusal.code(), refusal.to_string())
    }
}

pub(super) fn invalid(message: impl Into<String>) -> Refusal {
    Refusal::Request(Code::InvalidArgument, message.into())
}

pub(super) fn not_found(message: impl Into<String>) -> Refusal {
    Refusal::Request(Code::NotFound, message.into())
}

pub(super) fn unimplemented(message: impl Into<String>) -> Refusal {
    Refusal::Request(Code::Unimplemented, message.into())
}

/// The status of a batch: OK if every update succeeded, otherwise UNKNOWN with one `p4.v1.Error` for
/// each update (specification, section 12.3).
///
/// If the details are longer than [`DETAILS_BYTES_MAX`], their texts are omitted; if they are
/// still too long, the message lists the failed updates by index.
pub(super) fn batch_status(results: &[Result<(), Refusal>]) -> Result<(), Status> {
    let failed = results.iter().filter(|result| result.is_err()).count();
    if failed == 0 {
        return Ok(());
    }
    let message = format!("{failed} of {} updates failed", results.len());
    for with_text in [true, false] {
        let details = results.iter().map(|result| update_error(result, with_text)).collect();
        let status = rpc::Status { code: Code::Unknown.into(), message: message.clone(), details };
        let bytes = status.encode_to_vec();
        // The trailer encodes them as base64.
        if bytes.len().div_ceil(3) * 4 <= DETAILS_BYTES_MAX {
            return Err(Status::with_details(Code::Unknown, message, bytes.into()));
        }
    }
    Err(Status::unknown(format!("{message}: {}", named(results))))
}

fn update_error(result: &Result<(), Refusal>, with_text: bool) -> prost_types::Any {
    let error = match result {
        Ok(()) => v1::Error::default(),
        Err(refusal) => v1::Error {
            canonical_code: refusal.code().into(),
            message: if with_text { refusal.to_string() } else { String::new() },
            space: if with_text { ERROR_SPACE.to_owned() } else { String::new() },
            ..v1::Error::default()
        },
    };
    prost_types::Any {
        type_url: "type.googleapis.com/p4.v1.Error".to_owned(),
        value: error.encode_to_vec(),
    }
}

fn named(results: &[Result<(), Refusal>]) -> String {
    let failed = results.iter().enumerate().filter_map(|(index, result)| {
        result.as_ref().err().map(|refusal| format!("#{index} {:?}", refusal.code()))
    });
    let mut names: Vec<String> = failed.take(NAMED_MAX + 1).collect();
    if names.len() > NAMED_MAX {
        names.truncate(NAMED_MAX);
        names.push("and more".to_owned());
    }
    format!("{}; the details are too long for one response, send smaller batches", names.join(", "))
}
