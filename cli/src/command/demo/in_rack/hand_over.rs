//! A change of ownership, and the switch's `redirect` table before, during and after it.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use bluebridge::{Error, Event, Placement, Pointer};
use serde::Serialize;

use super::super::screen::Screen;
use super::{Clients, Stage, TABLE_COLUMNS, TableLine, table_rows};

/// How long to wait for an entry to appear or disappear.
const PATIENCE: Duration = Duration::from_secs(3);

/// How long the second client waits at the home before the first one commits.
const HOLD: Duration = Duration::from_millis(5);

/// What happened to the page.
#[derive(Debug, Serialize)]
pub(in crate::command::demo) struct HandOver {
    /// The switch's entry during the lease.
    redirect: String,
    /// The error of a client that does not wait.
    refusal: String,
    /// From the first client's COMMIT to the second one's grant, in microseconds.
    hand_over_us: f64,
}

impl Stage<'_> {
    pub(super) fn hand_over(
        &self,
        clients: &mut Clients,
        screen: &Screen,
    ) -> anyhow::Result<HandOver> {
        let home = clients.node(0)?;
        let region = clients.first.alloc_write_at(b"version 1", Placement::Node(home))?;
        let pointer = region.base();
        let before = self.redirects()?;
        ensure!(before.is_empty(), "there are redirects although nothing is leased: {before:?}");
        let Clients { first, second, .. } = &mut *clients;
        let mut bytes = [0; 9];
        let mut update = first.update(pointer, &mut bytes)?;
        let epoch = update.epoch();
        screen.say(&format!(
            "   Before: `redirect` is empty. c1 leases the page {pointer} with UPDATE (epoch {epoch:#x}) \
             and keeps it; c2 requests it too, again and again without waiting."
        ))?;

        let returned = second.counters().of(Event::RedirectReturn);
        let until = Instant::now() + PATIENCE;
        let refusal = loop {
            let refusal = refused(second.try_update(pointer, &mut [0; 9]).map(|_| ()))?;
            if second.counters().of(Event::RedirectReturn) > returned {
                break refusal;
            }
            ensure!(Instant::now() < until, "no request was redirected to the owner");
            thread::sleep(Duration::from_millis(1));
        };
        let during = self.redirects()?;
        let entry = during.first().context("a request was redirected without an entry")?;
        let redirect = format!("{} -> {}", entry.matches, entry.action);
        screen.say(
            "   During the lease: the home sent BUSY to c2, the switch copied this to the controller, and the \
             controller redirected requests for the page to c1 until the lease ends. c1 responds to them:",
        )?;
        screen.table(&TABLE_COLUMNS, table_rows(&during))?;
        screen.say(&format!("   c2 gets: {refusal}"))?;

        update.copy_from_slice(b"version 2");
        let (granted, committing) = thread::scope(|scope| {
            let waiting = scope.spawn(move || {
                let mut bytes = [0; 9];
                let taken = second.update(pointer, &mut bytes)?;
                let granted = Instant::now();
                ensure!(&*taken == b"version 2", "the next owner sees other bytes: {:?}", &*taken);
                taken.abort()?;
                anyhow::Ok(granted)
            });
            thread::sleep(HOLD);
            let committing = Instant::now();
            let committed = update.commit();
            let granted = waiting.join().map_err(|_| anyhow!("the second client panicked"))?;
            committed?;
            anyhow::Ok((granted?, committing))
        })?;
        let hand_over_us = granted.saturating_duration_since(committing).as_secs_f64() * 1e6;
        self.await_no_redirect(pointer)?;
        screen.say(&format!(
            "   After: c1 committed. c2, which waited at the home by then, got the page with c1's bytes \
             {hand_over_us:.0} us later, and `redirect` is empty again."
        ))?;
        clients.first.delete(region)?;
        Ok(HandOver { redirect, refusal, hand_over_us })
    }

    fn redirects(&self) -> anyhow::Result<Vec<TableLine>> {
        let lines = self.read_tables()?.lines.into_iter();
        Ok(lines.filter(|line| line.table == "redirect").collect())
    }

    fn await_no_redirect(&self, pointer: Pointer) -> anyhow::Result<()> {
        let until = Instant::now() + PATIENCE;
        while !self.redirects()?.is_empty() {
            ensure!(Instant::now() < until, "the redirect of {pointer} did not end with its lease");
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

/// The error of a client that did not get the page.
fn refused(tried: Result<(), Error>) -> anyhow::Result<String> {
    match tried {
        Err(error @ Error::Busy { .. }) => Ok(error.to_string()),
        Err(error) => Err(error.into()),
        Ok(()) => Err(anyhow!("a leased page was leased to another client")),
    }
}
