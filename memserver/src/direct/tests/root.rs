//! The program against the responder: what it answers equals what the responder answers, and what it
//! passes on is unchanged. The kernel runs it on frames without an interface (`BPF_PROG_TEST_RUN`).
//!
//! * `rig`, `frames`: a shard with the program, and what both get and send.
//! * `pages`, `lines`: READs of one page, and of several.
//! * `adopted`: READs of lines of other servers.
//! * `changes`: lines of which a page changes when others have been sent.
//! * `passed`: what is not a plain READ, and what is damaged.
//! * `sessions`: sessions, their numbers, and shards that do not serve.
//! * `writers`: READs beside a core that writes the same pages.
//! * `memory`: the map of an arena, beside its file and in its process.
//! * `kernels`: whether a kernel answers READs at all.

mod adopted;
mod changes;
mod frames;
mod kernels;
mod lines;
mod memory;
mod pages;
mod passed;
mod rig;
mod sessions;
mod writers;
