//! The store in each way: loaded, measured, and every value compared.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, anyhow, ensure};
use bluebridge_bench::summary::median;
use bluebridge_bench::swap::area::Area;
use bluebridge_bench::swap::cgroup::{Cgroup, Relief};
use bluebridge_bench::swap::machine::{Compression, Traffic};
use bluebridge_rack::Rack;
use bluebridge_rack::access::rack_environment;
use bluebridge_rack::state::StateRoot;
use rand::{Rng, SeedableRng, rngs::SmallRng};
use serde_json::Value;

use super::super::super::bench::machine::Machine;
use super::super::comparison::Swap;
use super::super::paging_latency::CLIENT;
use super::super::workout::Share;
use super::redis::{Programs, Rate, Server};
use super::resp::{Connection, Reply};
use super::{Findings, KeyValue, Row, Way};

/// Commands that are sent together.
const BATCH: u32 = 100;
const PAGE_BYTES: u64 = 4096;
/// The letters of values.
const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// What is needed to measure.
pub(super) struct Setting {
    pub(super) asked: KeyValue,
    pub(super) programs: Programs,
    /// This program.
    pub(super) program: PathBuf,
    pub(super) swap: Option<Arc<Swap>>,
    /// Where the store's messages go.
    pub(super) log: PathBuf,
}

/// The sizes of a store without `bluebridge run`.
#[derive(Clone, Copy)]
struct Sizes {
    data_bytes: u64,
    own_bytes: Option<u64>,
}

/// What a store showed.
struct Shown {
    get: Rate,
    set: Rate,
    faults: Option<u64>,
    read_bytes: u64,
    written_bytes: u64,
    compressed_share: Option<f64>,
    checked_count: u64,
    /// Its anonymous memory at the end.
    anonymous_bytes: u64,
}

/// Where a store has its memory.
#[derive(Default)]
struct Place {
    area: Option<Area>,
    group: Option<Cgroup>,
    relief: Option<Relief>,
}

impl Setting {
    pub(super) fn measure(&self, rack: &Rack, ways: &[(Way, u8)]) -> anyhow::Result<Findings> {
        rack.enter(CLIENT, || self.measure_inside(rack, ways))?
    }

    fn measure_inside(&self, rack: &Rack, ways: &[(Way, u8)]) -> anyhow::Result<Findings> {
        let asked = &self.asked;
        let mut sizes = None;
        let mut rows: Vec<Row> = ways.iter().map(|(way, percent)| row(*way, *percent)).collect();
        for _ in 0..asked.rounds {
            for row in &mut rows {
                let what = format!("{}, {} % local", row.way.words(), row.local_percent);
                let measured = self.one(rack, row, &mut sizes);
                let shown = measured.context(what)?;
                row.add(shown);
            }
        }
        compare(&mut rows);
        let Sizes { data_bytes, own_bytes } = sizes.context("nothing was measured")?;
        Ok(Findings {
            machine: Machine::look(),
            redis: self.programs.version()?,
            keys: asked.keys,
            value_bytes: asked.value_size,
            operations: asked.operations,
            connections: asked.connections,
            servers: asked.servers,
            data_bytes,
            own_bytes,
            rows,
            files: Vec::new(),
        })
    }

    /// Starts a store, measures it, and ends it.
    fn one(&self, rack: &Rack, row: &mut Row, sizes: &mut Option<Sizes>) -> anyhow::Result<Shown> {
        let mut place = Place::default();
        let command = self.command(rack, row, *sizes, &mut place)?;
        let before = Traffic::look()?;
        let mut server = Server::start(command, &self.log)?;
        let mut shown = self.exercise(&mut server, place.area.as_ref())?;
        if row.way == Way::Plain && sizes.is_none() {
            let peak = place.group.as_ref().map(Cgroup::peak).transpose()?;
            let data_bytes = shown.anonymous_bytes;
            let own_bytes = peak.map(|peak| peak.saturating_sub(data_bytes));
            *sizes = Some(Sizes { data_bytes, own_bytes });
        }
        server.end()?;
        row.relief_count += place.relief.take().as_ref().map_or(0, Relief::count);
        if row.way == Way::Run {
            self.add_summary(&mut shown)?;
        } else if row.way.kind().is_some() {
            let after = Traffic::look()?;
            shown.read_bytes = (after.pages_in - before.pages_in) * PAGE_BYTES;
            shown.written_bytes = (after.pages_out - before.pages_out) * PAGE_BYTES;
        }
        if let Some(swap) = &self.swap {
            // The store's end has freed its pages, so none has to return.
            if let Some(group) = &place.group {
                swap.remove_group(group)?;
            }
            if let Some(area) = &place.area {
                swap.off(area)?;
            }
        }
        Ok(shown)
    }

    fn command(
        &self,
        rack: &Rack,
        row: &mut Row,
        sizes: Option<Sizes>,
        place: &mut Place,
    ) -> anyhow::Result<Command> {
        let local = |sizes: Sizes| Share(row.local_percent).of_bytes(sizes.data_bytes);
        let known = || sizes.context("the store's size is not known");
        if row.way == Way::Run {
            let sizes = known()?;
            let bytes = match row.local_percent {
                // Another allocator needs more.
                100 => sizes.data_bytes.saturating_mul(2) + (64 << 20),
                _ => local(sizes).max(1 << 20),
            };
            row.local_bytes = Some(bytes);
            let mut run = Command::new(&self.program);
            run.args(["run", "--json", "--local", &bytes.to_string()]);
            run.envs(rack_environment(&StateRoot::locate(), rack.state(), CLIENT));
            return Ok(self.programs.server(Some(run)));
        }
        let mut command = self.programs.server(None);
        let Some(swap) = &self.swap else { return Ok(command) };
        let group = swap.group()?;
        if let Some(kind) = row.way.kind() {
            let sizes = known()?;
            let bytes = local(sizes);
            let limit = bytes + sizes.own_bytes.unwrap_or(0);
            (row.local_bytes, row.limit_bytes) = (Some(bytes), Some(limit));
            place.area = Some(swap.on(kind)?);
            group.set_limit(Some(limit))?;
            place.relief = Some(Relief::start(&group, limit)?);
        }
        group.hold(&mut command)?;
        place.group = Some(group);
        Ok(command)
    }

    /// Loads, measures and checks.
    fn exercise(&self, server: &mut Server, area: Option<&Area>) -> anyhow::Result<Shown> {
        let KeyValue { keys, value_size, operations, connections, .. } = self.asked;
        let mut connection = server.connect()?;
        self.load(&mut connection).context("cannot load the keys")?;
        let compression = area.and_then(|area| Compression::of(&area.path));
        let benchmark =
            |words: &[&str]| self.programs.benchmark(keys, operations, connections, words);
        let get = benchmark(&["GET", "key:__rand_int__"])?;
        let mut checked_count = self.check(&mut connection, None)?;
        let other = value(OTHER, value_size);
        let other = String::from_utf8(other).context("letters are text")?;
        let set = benchmark(&["SET", "key:__rand_int__", &other])?;
        checked_count += self.check(&mut connection, Some(other.as_bytes()))?;
        Ok(Shown {
            get,
            set,
            faults: area.and_then(|_| major_faults(server.id())),
            read_bytes: 0,
            written_bytes: 0,
            compressed_share: compression.and_then(Compression::share),
            checked_count,
            anonymous_bytes: anonymous_bytes(server.id())?,
        })
    }

    fn batches(&self) -> impl Iterator<Item = std::ops::Range<u32>> {
        let keys = self.asked.keys;
        (0..keys).step_by(BATCH as usize).map(move |start| start..(start + BATCH).min(keys))
    }

    fn load(&self, connection: &mut Connection) -> anyhow::Result<()> {
        for batch in self.batches() {
            let pairs: Vec<_> =
                batch.map(|number| (key(number), value(number, self.asked.value_size))).collect();
            let commands: Vec<Vec<&[u8]>> = pairs
                .iter()
                .map(|(key, value)| vec![&b"SET"[..], key.as_bytes(), &value[..]])
                .collect();
            for reply in connection.call(&commands)? {
                ensure!(reply == Reply::Text("OK".to_owned()), "redis replied {reply:?} to SET");
            }
        }
        Ok(())
    }

    /// Compares every value with the one that was loaded, or with the one that the benchmark may have written.
    fn check(&self, connection: &mut Connection, other: Option<&[u8]>) -> anyhow::Result<u64> {
        let mut count = 0;
        for batch in self.batches() {
            let keys: Vec<_> = batch.clone().map(key).collect();
            let commands: Vec<Vec<&[u8]>> =
                keys.iter().map(|key| vec![&b"GET"[..], key.as_bytes()]).collect();
            for (number, reply) in batch.zip(connection.call(&commands)?) {
                let own = value(number, self.asked.value_size);
                let is_right = match &reply {
                    Reply::Value(value) => *value == own || other == Some(&value[..]),
                    _ => false,
                };
                if !is_right {
                    return Err(anyhow!(
                        "the value of {} is not what was written: the store's memory is damaged",
                        key(number)
                    ));
                }
                count += 1;
            }
        }
        Ok(count)
    }

    /// Adds what `bluebridge run` printed at the end: the last line that is JSON.
    fn add_summary(&self, shown: &mut Shown) -> anyhow::Result<()> {
        let text = fs::read_to_string(&self.log);
        let text = text.with_context(|| format!("cannot read {}", self.log.display()))?;
        let summary = summary(&text).with_context(|| {
            format!("bluebridge run printed no summary; see {}", self.log.display())
        })?;
        (shown.faults, shown.read_bytes, shown.written_bytes) = summary;
        Ok(())
    }
}

/// A key, as redis-benchmark writes it for `key:__rand_int__`.
fn key(number: u32) -> String {
    format!("key:{number:012}")
}

/// The number of the value that the benchmark writes; it is no key's.
const OTHER: u32 = u32::MAX;

/// The value of a key: half of it is random letters, and half is equal ones, so that it can be compressed to about half.
fn value(number: u32, size: u32) -> Vec<u8> {
    let size = size as usize;
    let mut random = SmallRng::seed_from_u64(number.into());
    let letter = |at| match at < size / 2 {
        true => LETTERS[random.random_range(0..LETTERS.len())],
        false => b'.',
    };
    (0..size).map(letter).collect()
}

/// Remote faults, bytes read and bytes written, of the last summary in some lines.
fn summary(text: &str) -> Option<(Option<u64>, u64, u64)> {
    let summary = text.lines().rev().find_map(|line| {
        let value: Value = serde_json::from_str(line).ok()?;
        value.get("programs").is_some().then_some(value)
    })?;
    let programs = summary["programs"].as_array()?;
    let redis = programs.iter().find(|one| one["name"] == "redis-server")?;
    Some((
        redis["faults"]["remote"].as_u64(),
        redis["bytes_read"].as_u64()?,
        redis["bytes_written"].as_u64()?,
    ))
}

/// Memory of a process that is not a file's, local or not.
fn anonymous_bytes(id: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{id}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let kib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
    };
    let local = kib("RssAnon").with_context(|| format!("{path} has no RssAnon"))?;
    Ok((local + kib("VmSwap").unwrap_or(0)) << 10)
}

/// Faults of a process that had to wait for a page (`/proc/PID/stat`, field 12).
fn major_faults(id: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    let (_, after_name) = text.rsplit_once(')')?;
    after_name.split_whitespace().nth(9)?.parse().ok()
}

fn row(way: Way, local_percent: u8) -> Row {
    Row {
        way,
        local_percent,
        local_bytes: None,
        limit_bytes: None,
        get: Vec::new(),
        set: Vec::new(),
        get_ratio: f64::NAN,
        set_ratio: f64::NAN,
        faults: None,
        read_bytes: 0,
        written_bytes: 0,
        relief_count: 0,
        compressed_share: None,
        checked_count: 0,
    }
}

impl Row {
    fn add(&mut self, shown: Shown) {
        self.get.push(shown.get);
        self.set.push(shown.set);
        self.faults = shown.faults;
        self.read_bytes = shown.read_bytes;
        self.written_bytes = shown.written_bytes;
        self.compressed_share = shown.compressed_share;
        self.checked_count += shown.checked_count;
    }
}

/// Fills in the ratios to the first row.
fn compare(rows: &mut [Row]) {
    let Some(plain) = rows.first().cloned() else { return };
    let ratio = |ours: &[Rate], plain: &[Rate]| {
        let rounds = ours.iter().zip(plain);
        median(&rounds.map(|(ours, plain)| ours.per_second / plain.per_second).collect::<Vec<_>>())
    };
    for row in rows {
        row.get_ratio = ratio(&row.get, &plain.get);
        row.set_ratio = ratio(&row.set, &plain.set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_checkable_and_compress_to_half() {
        assert_eq!(key(42), "key:000000000042");
        let (one, two) = (value(1, 1000), value(2, 1000));
        assert_eq!((one.len(), value(1, 1000)), (1000, one.clone()));
        let alike = one.iter().zip(&two).filter(|(one, two)| one == two).count();
        assert!((500..600).contains(&alike), "{alike}");
        assert!(one.iter().all(|letter| *letter != b'"' && *letter != b','), "for the CSV");
    }

    #[test]
    fn the_last_summary_is_found_among_messages() {
        let line = |read: u64| {
            format!(
                "{{\"seconds\":1.5,\"programs\":[{{\"name\":\"redis-server\",\"faults\":{{\"remote\":7}},\
                 \"bytes_read\":{read},\"bytes_written\":2}}],\"not_freed\":0}}"
            )
        };
        let text = format!("1:M Ready\n{}\n{}\n{{\"x\":1}}\n", line(1), line(9));
        assert_eq!(summary(&text), Some((Some(7), 9, 2)));
        assert_eq!(summary("1:M Ready\n"), None);
        assert_eq!(summary("{\"programs\":[]}"), None);
    }

    #[test]
    fn sizes_of_this_process_are_read() {
        let id = std::process::id();
        assert!(anonymous_bytes(id).expect("Linux has it") > 1 << 16);
        assert!(major_faults(id).is_some());
        assert!(anonymous_bytes(u32::MAX).is_err());
    }

    #[test]
    fn ratios_are_medians_over_the_rounds() {
        let rate = |per_second| Rate { per_second, p50_ms: 1.0, p99_ms: 2.0 };
        let mut rows = vec![row(Way::Plain, 100), row(Way::Run, 50)];
        rows[0].get = vec![rate(100.0), rate(200.0), rate(100.0)];
        rows[1].get = vec![rate(50.0), rate(20.0), rate(60.0)];
        compare(&mut rows);
        assert_eq!((rows[0].get_ratio, rows[1].get_ratio), (1.0, 0.5));
    }
}
