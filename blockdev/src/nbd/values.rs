//! The numbers of the specification.

/// "NBDMAGIC", the first bytes of a server.
pub(super) const INIT_MAGIC: [u8; 8] = *b"NBDMAGIC";
/// "IHAVEOPT", before the handshake flags and before each option.
pub(super) const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

// Handshake flags, and the client's flags of the same meaning.
pub(super) const FIXED_NEWSTYLE: u16 = 1;
pub(super) const NO_ZEROES: u16 = 1 << 1;

// Options.
pub(super) const OPT_EXPORT_NAME: u32 = 1;
pub(super) const OPT_ABORT: u32 = 2;
pub(super) const OPT_LIST: u32 = 3;
pub(super) const OPT_INFO: u32 = 6;
pub(super) const OPT_GO: u32 = 7;
pub(super) const OPT_STRUCTURED_REPLY: u32 = 8;

// Replies to options.
pub(super) const REP_ACK: u32 = 1;
pub(super) const REP_SERVER: u32 = 2;
pub(super) const REP_INFO: u32 = 3;
const ERROR: u32 = 1 << 31;
pub(super) const REP_ERR_UNSUP: u32 = ERROR + 1;
pub(super) const REP_ERR_INVALID: u32 = ERROR + 3;
pub(super) const REP_ERR_UNKNOWN: u32 = ERROR + 6;
pub(super) const REP_ERR_TOO_BIG: u32 = ERROR + 9;

// Kinds of information.
pub(super) const INFO_EXPORT: u16 = 0;
pub(super) const INFO_NAME: u16 = 1;
pub(super) const INFO_DESCRIPTION: u16 = 2;
pub(super) const INFO_BLOCK_SIZE: u16 = 3;

// Transmission flags.
pub(super) const HAS_FLAGS: u16 = 1;
pub(super) const READ_ONLY: u16 = 1 << 1;
pub(super) const SEND_FLUSH: u16 = 1 << 2;
pub(super) const SEND_FUA: u16 = 1 << 3;
pub(super) const SEND_TRIM: u16 = 1 << 5;
pub(super) const SEND_WRITE_ZEROES: u16 = 1 << 6;
pub(super) const SEND_DF: u16 = 1 << 7;
pub(super) const CAN_MULTI_CONN: u16 = 1 << 8;
pub(super) const SEND_FAST_ZERO: u16 = 1 << 11;

// Requests.
pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const CMD_READ: u16 = 0;
pub(super) const CMD_WRITE: u16 = 1;
pub(super) const CMD_DISC: u16 = 2;
pub(super) const CMD_FLUSH: u16 = 3;
pub(super) const CMD_TRIM: u16 = 4;
pub(super) const CMD_WRITE_ZEROES: u16 = 6;

// Flags of requests.
pub(super) const CMD_FLAG_FUA: u16 = 1;
pub(super) const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
pub(super) const CMD_FLAG_DF: u16 = 1 << 2;
pub(super) const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;

// Replies.
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(super) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
pub(super) const REPLY_FLAG_DONE: u16 = 1;
pub(super) const REPLY_TYPE_OFFSET_DATA: u16 = 1;
pub(super) const REPLY_TYPE_OFFSET_HOLE: u16 = 2;
pub(super) const REPLY_TYPE_ERROR: u16 = (1 << 15) + 1;

/// Blocks: any byte can be addressed, and pages are efficient.
pub(super) const BLOCK_BYTES_MIN: u32 = 1;
pub(super) const BLOCK_BYTES_PREFERRED: u32 = 4096;
