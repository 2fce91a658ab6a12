//! Packet vectors in the format of P4's Simple Test Framework (STF), one statement per line.
//!
//! ```text
//! # a comment
//! add TABLE [PRIORITY] FIELD:VALUE .. ACTION(PARAM:VALUE, ..) [= NAME]
//! setdefault l2 set_multicast_group(group:N)
//! mc_mgrp_create GROUP
//! mc_node_create RID PORT ..           (nodes are numbered from 0 in the order of the file)
//! mc_node_associate GROUP NODE
//! mirroring_add SESSION PORT
//! packet PORT HEX
//! expect PORT HEX [$]                  (`*` is any digit; `$`: no bytes may follow)
//! wait MILLISECONDS                    (so that an entry expires)
//! check_counter drops(REASON) packets == N
//! check_counter TABLE($NAME) packets|bytes == N
//! ```
//!
//! Values are decimal or `0x` numbers, with `/LENGTH` for a prefix and `&&&MASK` for a ternary.
//! Unexpected frames are errors; spaces in hex are ignored.

use std::{collections::HashMap, iter::Peekable, str::SplitWhitespace, time::Duration};

use bluebridge_p4::declaration::Table;
use bluebridge_p4::pipeline::{
    Action, DropReason, Entry, Forward, Key, MacAddr, SwitchPort, Ternary, WeightedForward,
};

/// The counter of a check.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Check {
    /// Frames dropped for a reason.
    Drops(DropReason),
    /// Packets that hit a named entry.
    Packets(String),
    /// Bytes that hit a named entry.
    Bytes(String),
}

/// A line of a vector.
#[derive(Clone, Debug)]
pub enum Statement {
    /// Adds an entry.
    Add {
        /// The entry.
        entry: Entry,
        /// Its name in checks.
        name: Option<String>,
    },
    /// Sets the group that `l2` floods through.
    Flood {
        /// The group.
        group: u16,
    },
    /// Defines a set of ports.
    Node {
        /// The ports.
        ports: Vec<SwitchPort>,
    },
    /// Gives a group the ports of a set.
    Associate {
        /// The group.
        group: u16,
        /// The number of the set.
        node: usize,
    },
    /// Sets the clone session.
    Mirror,
    /// Sends a frame into the switch.
    Packet {
        /// The ingress port.
        port: SwitchPort,
        /// The frame.
        frame: Vec<u8>,
    },
    /// Expects a frame.
    Expect {
        /// The egress port, or that of the controller.
        port: SwitchPort,
        /// What it looks like.
        pattern: Pattern,
    },
    /// Checks a counter.
    Count {
        /// Which.
        check: Check,
        /// Its value.
        count: u64,
    },
    /// Waits.
    Wait {
        /// How long.
        pause: Duration,
    },
}

/// The nibbles that a frame must have; `None` is any.
#[derive(Clone, Debug)]
pub struct Pattern {
    nibbles: Vec<Option<u8>>,
    is_whole: bool,
}

impl Pattern {
    /// Whether a frame has these nibbles.
    #[must_use]
    pub fn matches(&self, frame: &[u8]) -> bool {
        let nibbles: Vec<u8> = frame.iter().flat_map(|byte| [byte >> 4, byte & 15]).collect();
        let length_fits = if self.is_whole {
            nibbles.len() == self.nibbles.len()
        } else {
            nibbles.len() >= self.nibbles.len()
        };
        length_fits
            && self.nibbles.iter().zip(nibbles).all(|(want, is)| want.is_none_or(|want| want == is))
    }
}

type Words<'a> = Peekable<SplitWhitespace<'a>>;

/// Reads a vector.
///
/// # Errors
/// A text that names the line and says what is wrong.
pub fn parse(text: &str) -> Result<Vec<Statement>, String> {
    let mut statements = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        match statement(line) {
            Ok(Some(statement)) => statements.push(statement),
            Ok(None) => {}
            Err(why) => return Err(format!("line {number}: {why}")),
        }
    }
    Ok(statements)
}

fn statement(line: &str) -> Result<Option<Statement>, String> {
    let mut words = line.split_whitespace().peekable();
    let verb = words.next().unwrap_or_default();
    Ok(Some(match verb {
        "add" => add(line.trim_start_matches("add").trim())?,
        "setdefault" => {
            let rest = line.trim_start_matches("setdefault").trim();
            let call = rest.strip_prefix("l2 ").ok_or("only l2 has a default action")?;
            match action(call)? {
                Action::SetMulticastGroup { group } => Statement::Flood { group },
                other => return Err(format!("l2 cannot default to {other:?}")),
            }
        }
        "mc_mgrp_create" => {
            number::<u16>(&mut words)?;
            return Ok(None);
        }
        "mc_node_create" => {
            number::<u16>(&mut words)?;
            let mut ports = Vec::new();
            while words.peek().is_some() {
                ports.push(SwitchPort(number(&mut words)?));
            }
            Statement::Node { ports }
        }
        "mc_node_associate" => {
            Statement::Associate { group: number(&mut words)?, node: number(&mut words)? }
        }
        "mirroring_add" => Statement::Mirror,
        "packet" => {
            let port = SwitchPort(number(&mut words)?);
            let nibbles: Option<Vec<u8>> = hex(words).nibbles.into_iter().collect();
            let nibbles = nibbles.ok_or("a packet has no wildcards")?;
            let frame = nibbles.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
            Statement::Packet { port, frame }
        }
        "expect" => {
            Statement::Expect { port: SwitchPort(number(&mut words)?), pattern: hex(words) }
        }
        "wait" => Statement::Wait { pause: Duration::from_millis(number(&mut words)?) },
        "check_counter" => check_counter(words)?,
        _ => return Err(format!("unknown statement {verb}")),
    }))
}

fn hex(words: Words<'_>) -> Pattern {
    let text: String = words.collect();
    let is_whole = text.ends_with('$');
    let digit = |c: char| c.to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let nibbles = text.trim_end_matches('$').chars().map(digit).collect();
    Pattern { nibbles, is_whole }
}

fn check_counter(mut words: Words<'_>) -> Result<Statement, String> {
    let what = words.next().ok_or("check_counter what?")?;
    let kind = words.next().ok_or("packets or bytes?")?;
    if words.next() != Some("==") {
        return Err("only == is supported".to_owned());
    }
    let (table, index) =
        what.strip_suffix(')').and_then(|w| w.split_once('(')).ok_or("TABLE(INDEX)")?;
    let check = match (table, index.strip_prefix('$'), kind) {
        ("drops", None, "packets") => {
            let found = DropReason::ALL.into_iter().find(|reason| reason.name() == index);
            Check::Drops(found.ok_or_else(|| format!("no reason {index}"))?)
        }
        (_, Some(name), "packets") => Check::Packets(name.to_owned()),
        (_, Some(name), "bytes") => Check::Bytes(name.to_owned()),
        _ => return Err(format!("cannot check {what} {kind}")),
    };
    Ok(Statement::Count { check, count: number(&mut words)? })
}

fn number<T: TryFrom<u128>>(words: &mut Words<'_>) -> Result<T, String> {
    value(words.next().ok_or("a number is missing")?)
}

fn value<T: TryFrom<u128>>(text: &str) -> Result<T, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u128::from_str_radix(&hex.replace('_', ""), 16),
        None => text.parse(),
    };
    let number = parsed.map_err(|e| format!("{text}: {e}"))?;
    T::try_from(number).map_err(|_| format!("{text} is too large"))
}

fn mac(text: &str) -> Result<MacAddr, String> {
    let [_, _, bytes @ ..] = value::<u64>(text)?.to_be_bytes();
    Ok(MacAddr(bytes))
}

/// The fields of a match or the parameters of an action.
struct Fields<'a>(HashMap<&'a str, &'a str>);

impl<'a> Fields<'a> {
    fn text(&self, name: &str) -> Result<&'a str, String> {
        self.0.get(name).copied().ok_or_else(|| format!("{name} is missing"))
    }

    fn value<T: TryFrom<u128>>(&self, name: &str) -> Result<T, String> {
        value(self.text(name)?)
    }

    /// A ternary; an omitted field matches anything.
    fn ternary(&self, name: &str) -> Result<Ternary, String> {
        let Some(text) = self.0.get(name) else { return Ok(Ternary::default()) };
        let (value_text, mask_text) = text.split_once("&&&").unwrap_or((text, "0xff"));
        Ok(Ternary { value: value(value_text)?, mask: value(mask_text)? })
    }
}

fn add(rest: &str) -> Result<Statement, String> {
    let (head, tail) = rest.split_once(')').ok_or("an action is missing")?;
    let open = head.find('(').ok_or("an action is missing")?;
    let start = head[..open].rfind(' ').ok_or("a table is missing")? + 1;
    let name = tail.trim().strip_prefix('=').map(|name| name.trim().to_owned());
    let mut words = head[..start].split_whitespace().peekable();
    let table = words.next().ok_or("a table is missing")?;
    let priority = match words.peek() {
        Some(word) if !word.contains(':') => number(&mut words)?,
        _ => 1,
    };
    let fields: HashMap<_, _> = words.filter_map(|word| word.split_once(':')).collect();
    let key = key(table, &Fields(fields), priority)?;
    let action = action(&head[start..])?;
    Ok(Statement::Add {
        entry: Entry { key, action, idle_timeout: None, metadata: Vec::new() },
        name,
    })
}

fn key(table: &str, fields: &Fields<'_>, priority: i32) -> Result<Key, String> {
    let found = Table::ALL.into_iter().find(|t| t.name() == table);
    Ok(match found.ok_or_else(|| format!("no table {table}"))? {
        Table::IngressGuard => Key::IngressGuard {
            port: SwitchPort(fields.value("ingress_port")?),
            src_scope: fields.value("src_scope")?,
            src_node: fields.value("src_node")?,
        },
        Table::Redirect => Key::Redirect {
            dst_scope: fields.value("dst_scope")?,
            dst_node: fields.value("dst_node")?,
            page: fields.value("page")?,
        },
        Table::Directory => {
            let text = fields.text("location")?;
            let (prefix, length) = text.split_once('/').unwrap_or((text, "112"));
            Key::Directory { prefix: value(prefix)?, prefix_len: value(length)? }
        }
        Table::Anycast => Key::Anycast { dst_scope: fields.value("dst_scope")? },
        Table::Notify => Key::Notify {
            src_command: fields.ternary("src_command")?,
            dst_command: fields.ternary("dst_command")?,
            src_status: fields.ternary("src_status")?,
            priority,
        },
        Table::L2 => Key::L2 { dst_mac: mac(fields.text("dst_mac")?)? },
        Table::PortMac => Key::PortMac { port: SwitchPort(fields.value("egress_port")?) },
        Table::Multicast => Key::Multicast { dst_scope: fields.value("dst_scope")? },
    })
}

fn action(call: &str) -> Result<Action, String> {
    let (name, params) = call.trim_end_matches(')').split_once('(').ok_or("ACTION(..)")?;
    let pairs: Vec<_> =
        params.split(',').filter_map(|param| param.trim().split_once(':')).collect();
    let forward = |fields: &Fields<'_>| -> Result<Forward, String> {
        let port = SwitchPort(fields.value("port")?);
        Ok(Forward { port, dst_mac: mac(fields.text("dst_mac")?)? })
    };
    let fields = Fields(pairs.iter().copied().collect());
    Ok(match name {
        "allow" => Action::Allow,
        "drop" => Action::Drop,
        "forward" => Action::Forward(forward(&fields)?),
        "redirect_until" => Action::RedirectUntil {
            forward: forward(&fields)?,
            lease_ms: fields.value("lease_ms")?,
        },
        "set_multicast_group" => Action::SetMulticastGroup { group: fields.value("group")? },
        "copy_to_controller" => Action::CopyToController,
        "set_dst_mac" => Action::SetDstMac(mac(fields.text("dst_mac")?)?),
        "select" => {
            // The members follow each other, three parameters each.
            let member = |pairs: &[(&str, &str)]| {
                let fields = Fields(pairs.iter().copied().collect());
                Ok(WeightedForward { forward: forward(&fields)?, weight: fields.value("weight")? })
            };
            let members: Result<_, String> = pairs.chunks(3).map(member).collect();
            Action::Select(members?)
        }
        _ => return Err(format!("no action {name}")),
    })
}
