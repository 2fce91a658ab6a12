//! Orders and reports as messages. What comes from outside is checked: numbers, and that nothing is missing.

use std::ops::Range;
use std::time::Duration;

use bluebridge_wire::{ArenaGeneration, Fence, NodeId, Space};

use super::{
    Contents, Deputyship, EarlierRow, Elsewhere, Generations, Order, OrderKind, Refusal, Report,
    ServedRow, Terms,
};
use crate::proto;
use proto::migration_order::Order as OrderBody;
use proto::migration_report::Report as ReportBody;

/// The rule that a message breaks.
type Broken = &'static str;

const MISSING: Broken = "a part of the message is missing";

fn node(number: u32) -> Result<NodeId, Broken> {
    u16::try_from(number).map(NodeId).map_err(|_| "a node id must fit 16 bits")
}

fn generation(number: u32) -> Result<ArenaGeneration, Broken> {
    let number = u16::try_from(number).ok();
    number.and_then(ArenaGeneration::new).ok_or("an arena generation must be below 32768")
}

fn pages(first: u64, count: u64) -> Result<Range<u64>, Broken> {
    let end = first.checked_add(count).ok_or("pages must fit 64 bits")?;
    if count == 0 { Err("a row must have pages") } else { Ok(first..end) }
}

impl From<Contents> for proto::Contents {
    fn from(of: Contents) -> Self {
        Self { node: of.node.0.into(), generation: of.generation.number().into() }
    }
}

fn contents(of: Option<proto::Contents>) -> Result<Contents, Broken> {
    let of = of.ok_or(MISSING)?;
    Ok(Contents { node: node(of.node)?, generation: generation(of.generation)? })
}

fn row(pages: &Range<u64>) -> proto::PageRow {
    let (first_page, page_count) = (pages.start, pages.end.saturating_sub(pages.start));
    proto::PageRow { first_page, page_count, ..proto::PageRow::default() }
}

fn rows(of: &[Range<u64>]) -> Vec<proto::PageRow> {
    of.iter().map(row).collect()
}

fn parse_rows(of: Vec<proto::PageRow>) -> Result<Vec<Range<u64>>, Broken> {
    of.into_iter().map(|row| pages(row.first_page, row.page_count)).collect()
}

fn served(of: &[ServedRow]) -> Vec<proto::PageRow> {
    let served = |of: &ServedRow| proto::PageRow {
        first_generation: of.generations.first.number().into(),
        last_generation: of.generations.last.number().into(),
        ..row(&of.pages)
    };
    of.iter().map(served).collect()
}

fn parse_served(of: Vec<proto::PageRow>) -> Result<Vec<ServedRow>, Broken> {
    let parse = |row: proto::PageRow| {
        let first = generation(row.first_generation)?;
        let last = generation(row.last_generation)?;
        let pages = pages(row.first_page, row.page_count)?;
        Ok(ServedRow { pages, generations: Generations { first, last } })
    };
    of.into_iter().map(parse).collect()
}

fn fences(of: &[Fence]) -> proto::Fences {
    let fence = |of: &Fence| proto::Fence { node: of.node.0.into(), incarnation: of.incarnation };
    proto::Fences { fences: of.iter().map(fence).collect() }
}

fn parse_fences(of: proto::Fences) -> Result<Vec<Fence>, Broken> {
    let parse = |of: proto::Fence| Ok(Fence { node: node(of.node)?, incarnation: of.incarnation });
    of.fences.into_iter().map(parse).collect()
}

fn terms(of: &Terms) -> proto::MigrationTerms {
    let proto::PageRow { first_page, page_count, .. } = row(&of.pages);
    proto::MigrationTerms {
        range_epoch: of.range_epoch,
        home: Some(of.home.into()),
        space: of.space.0.into(),
        first_page,
        page_count,
        giver: Some(of.giver.into()),
        taker: Some(of.taker.into()),
        taker_incarnation: of.taker_incarnation,
    }
}

fn parse_terms(migration: u64, of: proto::MigrationTerms) -> Result<Terms, Broken> {
    let space = u16::try_from(of.space).map(Space).map_err(|_| "a space must fit 16 bits")?;
    Ok(Terms {
        migration,
        range_epoch: of.range_epoch,
        home: contents(of.home)?,
        space,
        pages: pages(of.first_page, of.page_count)?,
        giver: contents(of.giver)?,
        taker: contents(of.taker)?,
        taker_incarnation: of.taker_incarnation,
    })
}

fn free_lines(home: Contents, pages: &[Range<u64>]) -> proto::FreeLines {
    proto::FreeLines { home: Some(home.into()), rows: rows(pages), round: 0 }
}

fn parse_free_lines(of: proto::FreeLines) -> Result<(Contents, Vec<Range<u64>>), Broken> {
    Ok((contents(of.home)?, parse_rows(of.rows)?))
}

fn round(home: Contents, number: u64) -> proto::Round {
    proto::Round { home: Some(home.into()), number }
}

fn parse_elsewhere(of: proto::Elsewhere) -> Result<Elsewhere, Broken> {
    let parse = |row: proto::PageRow| {
        Ok::<_, Broken>((pages(row.first_page, row.page_count)?, node(row.server)?))
    };
    Ok(Elsewhere {
        home: contents(of.home)?,
        version: of.version,
        rows: of.rows.into_iter().map(parse).collect::<Result<_, _>>()?,
        lost: parse_rows(of.lost)?,
    })
}

impl From<EarlierRow> for proto::EarlierRow {
    fn from(of: EarlierRow) -> Self {
        let proto::PageRow { first_page, page_count, .. } = row(&of.pages);
        let server = of.at.map_or(0, |at| at.0.into());
        Self { generation: of.generation.number().into(), first_page, page_count, server }
    }
}

impl TryFrom<proto::EarlierRow> for EarlierRow {
    type Error = Broken;

    fn try_from(of: proto::EarlierRow) -> Result<Self, Broken> {
        let at = (of.server != 0).then(|| node(of.server)).transpose()?;
        let pages = pages(of.first_page, of.page_count)?;
        Ok(Self { generation: generation(of.generation)?, pages, at })
    }
}

fn deputyship(of: Deputyship) -> proto::Deputyship {
    proto::Deputyship {
        home: of.home.0.into(),
        incarnation: of.incarnation,
        space: of.space.0.into(),
        range_epoch: of.range_epoch,
        last_generation: of.last_generation.number().into(),
        idle_ms: u64::try_from(of.idle.as_millis()).unwrap_or(u64::MAX),
        version: of.version,
        contents: of.contents.iter().map(|of| of.number().into()).collect(),
        rows: of.rows.into_iter().map(Into::into).collect(),
    }
}

fn parse_deputyship(of: proto::Deputyship) -> Result<Deputyship, Broken> {
    Ok(Deputyship {
        home: node(of.home)?,
        incarnation: of.incarnation,
        space: u16::try_from(of.space).map(Space).map_err(|_| "a space must fit 16 bits")?,
        range_epoch: of.range_epoch,
        last_generation: generation(of.last_generation)?,
        idle: Duration::from_millis(of.idle_ms),
        version: of.version,
        contents: of.contents.into_iter().map(generation).collect::<Result<_, _>>()?,
        rows: of.rows.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
    })
}

fn deputy_round(home: NodeId, incarnation: u32, version: u64) -> proto::DeputyRound {
    proto::DeputyRound { home: home.0.into(), incarnation, version }
}

impl From<Order> for proto::MigrationOrder {
    fn from(order: Order) -> Self {
        use proto::MigrationStep as Step;
        let step = |step: Step| OrderBody::Step(step.into());
        let (migration, body) = match order {
            Order::Take { terms: of, fences: seen } => {
                let (terms, fences) = (Some(terms(&of)), Some(fences(&seen)));
                (of.migration, OrderBody::Take(proto::MigrationTake { terms, fences }))
            }
            Order::Allow(of) => (of.migration, OrderBody::Allow(terms(&of))),
            Order::Reserve(of) => (of.migration, OrderBody::Reserve(terms(&of))),
            Order::Forget(migration) => (migration, step(Step::Forget)),
            Order::Release(migration) => (migration, step(Step::Release)),
            Order::Settle(of) => (of.migration, OrderBody::Settle(terms(&of))),
            Order::Withdraw(migration) => (migration, step(Step::Withdraw)),
            Order::Learn(of) => {
                let placed = |(pages, at): &(Range<u64>, NodeId)| proto::PageRow {
                    server: at.0.into(),
                    ..row(pages)
                };
                let learn = proto::Elsewhere {
                    home: Some(of.home.into()),
                    version: of.version,
                    rows: of.rows.iter().map(placed).collect(),
                    lost: rows(&of.lost),
                };
                (0, OrderBody::Learn(learn))
            }
            Order::Lose { node, began } => {
                (0, OrderBody::Lose(Contents { node, generation: began }.into()))
            }
            Order::Report { home, round: number } => (0, OrderBody::Report(round(home, number))),
            Order::Deputize(of) => (0, OrderBody::Deputize(deputyship(of))),
            Order::Discard { home, round, pages } => {
                (0, OrderBody::Discard(proto::FreeLines { round, ..free_lines(home, &pages) }))
            }
            Order::Dismiss { home, incarnation } => {
                (0, OrderBody::Dismiss(deputy_round(home, incarnation, 0)))
            }
            Order::Seal(is_on) => (0, OrderBody::Seal(is_on)),
        };
        Self { migration, order: Some(body) }
    }
}

impl TryFrom<proto::MigrationOrder> for Order {
    type Error = &'static str;

    fn try_from(order: proto::MigrationOrder) -> Result<Self, Broken> {
        use proto::MigrationStep as Step;
        let migration = order.migration;
        Ok(
            match order.order.ok_or("this version of the memory server does not know the order")? {
                OrderBody::Lose(of) => {
                    let Contents { node, generation: began } = contents(Some(of))?;
                    Self::Lose { node, began }
                }
                OrderBody::Learn(of) => Self::Learn(parse_elsewhere(of)?),
                OrderBody::Report(of) => {
                    Self::Report { home: contents(of.home)?, round: of.number }
                }
                OrderBody::Reserve(of) => Self::Reserve(parse_terms(migration, of)?),
                OrderBody::Deputize(of) => Self::Deputize(parse_deputyship(of)?),
                OrderBody::Discard(of) => {
                    let round = of.round;
                    let (home, pages) = parse_free_lines(of)?;
                    Self::Discard { home, round, pages }
                }
                OrderBody::Dismiss(of) => {
                    Self::Dismiss { home: node(of.home)?, incarnation: of.incarnation }
                }
                OrderBody::Seal(is_on) => Self::Seal(is_on),
                OrderBody::Allow(of) => Self::Allow(parse_terms(migration, of)?),
                OrderBody::Take(of) => Self::Take {
                    terms: parse_terms(migration, of.terms.ok_or(MISSING)?)?,
                    fences: parse_fences(of.fences.unwrap_or_default())?,
                },
                OrderBody::Settle(of) => Self::Settle(parse_terms(migration, of)?),
                OrderBody::Step(step) => match Step::try_from(step) {
                    Ok(Step::Withdraw) => Self::Withdraw(migration),
                    Ok(Step::Forget) => Self::Forget(migration),
                    Ok(Step::Release) => Self::Release(migration),
                    _ => return Err("this version of the memory server does not know the order"),
                },
            },
        )
    }
}

impl From<OrderKind> for proto::MigrationStep {
    fn from(kind: OrderKind) -> Self {
        match kind {
            OrderKind::Allow => Self::Allow,
            OrderKind::Forget => Self::Forget,
            OrderKind::Release => Self::Release,
            OrderKind::Reserve => Self::Reserve,
            OrderKind::Settle => Self::Settle,
            OrderKind::Take => Self::Take,
            OrderKind::Withdraw => Self::Withdraw,
        }
    }
}

fn parse_kind(step: i32) -> Result<OrderKind, Broken> {
    use proto::MigrationStep as Step;
    Ok(match Step::try_from(step).map_err(|_| "the order is not known")? {
        Step::Unspecified => return Err(MISSING),
        Step::Allow => OrderKind::Allow,
        Step::Forget => OrderKind::Forget,
        Step::Release => OrderKind::Release,
        Step::Reserve => OrderKind::Reserve,
        Step::Settle => OrderKind::Settle,
        Step::Take => OrderKind::Take,
        Step::Withdraw => OrderKind::Withdraw,
    })
}

fn refused(order: OrderKind, why: &Refusal) -> proto::MigrationRefused {
    use proto::MigrationRefusal as Reason;
    let (reason, words) = match why {
        Refusal::Contradiction => (Reason::Contradiction, ""),
        Refusal::Full => (Reason::Full, ""),
        Refusal::Late => (Reason::Late, ""),
        Refusal::NoRoom => (Reason::NoRoom, ""),
        Refusal::Overlap => (Reason::Overlap, ""),
        Refusal::Space => (Reason::Space, ""),
        Refusal::Unknown => (Reason::Unknown, ""),
        Refusal::Other(words) => (Reason::Other, words.as_str()),
    };
    proto::MigrationRefused {
        step: proto::MigrationStep::from(order).into(),
        reason: reason.into(),
        words: words.to_owned(),
    }
}

fn parse_refusal(reason: i32, words: String) -> Refusal {
    use proto::MigrationRefusal as Reason;
    match Reason::try_from(reason) {
        Ok(Reason::Contradiction) => Refusal::Contradiction,
        Ok(Reason::Full) => Refusal::Full,
        Ok(Reason::Late) => Refusal::Late,
        Ok(Reason::NoRoom) => Refusal::NoRoom,
        Ok(Reason::Overlap) => Refusal::Overlap,
        Ok(Reason::Space) => Refusal::Space,
        Ok(Reason::Unknown) => Refusal::Unknown,
        Ok(Reason::Other) | Err(_) => Refusal::Other(words),
    }
}

impl From<Report> for proto::MigrationReport {
    fn from(report: Report) -> Self {
        let done = |kind: OrderKind| ReportBody::Done(proto::MigrationStep::from(kind).into());
        let (migration, body) = match report {
            Report::Allowed { migration, fences: of } => {
                (migration, ReportBody::Allowed(fences(&of)))
            }
            Report::Claims { home, round: number, served: of, given, lost } => {
                let claims = proto::Claims {
                    round: Some(round(home, number)),
                    served: served(&of),
                    given: rows(&given),
                    lost: rows(&lost),
                };
                (0, ReportBody::Claims(claims))
            }
            Report::Deputized { home, incarnation, version } => {
                (0, ReportBody::Deputized(deputy_round(home, incarnation, version)))
            }
            Report::Dismissed { home, incarnation } => {
                (0, ReportBody::Dismissed(deputy_round(home, incarnation, 0)))
            }
            Report::Sealed(is_on) => (0, ReportBody::Sealed(is_on)),
            Report::Free { home, pages } => (0, ReportBody::Free(free_lines(home, &pages))),
            Report::Forgotten(migration) => (migration, done(OrderKind::Forget)),
            Report::Learned { home, version } => (0, ReportBody::Learned(round(home, version))),
            Report::Lost { node, began } => {
                (0, ReportBody::Lost(Contents { node, generation: began }.into()))
            }
            Report::Progress {
                migration,
                kept,
                on_the_way_count,
                in_doubt_count,
                free_count,
                is_done,
            } => {
                let kept = served(&kept);
                let progress = proto::MigrationProgress {
                    kept,
                    on_the_way_count,
                    in_doubt_count,
                    is_done,
                    free_count,
                };
                (migration, ReportBody::Progress(progress))
            }
            Report::Refused { migration, order, why } => {
                (migration, ReportBody::Refused(refused(order, &why)))
            }
            Report::Released(migration) => (migration, done(OrderKind::Release)),
            Report::Reserved(migration) => (migration, done(OrderKind::Reserve)),
            Report::Settled { migration, kept } => {
                (migration, ReportBody::Settled(proto::MigrationSettled { kept: served(&kept) }))
            }
            Report::Withdrawn(migration) => (migration, done(OrderKind::Withdraw)),
        };
        Self { migration, report: Some(body) }
    }
}

impl TryFrom<proto::MigrationReport> for Report {
    type Error = &'static str;

    fn try_from(report: proto::MigrationReport) -> Result<Self, Broken> {
        let migration = report.migration;
        Ok(match report.report.ok_or(MISSING)? {
            ReportBody::Lost(of) => {
                let Contents { node, generation: began } = contents(Some(of))?;
                Self::Lost { node, began }
            }
            ReportBody::Learned(of) => {
                Self::Learned { home: contents(of.home)?, version: of.number }
            }
            ReportBody::Claims(of) => {
                let round = of.round.ok_or(MISSING)?;
                Self::Claims {
                    home: contents(round.home)?,
                    round: round.number,
                    served: parse_served(of.served)?,
                    given: parse_rows(of.given)?,
                    lost: parse_rows(of.lost)?,
                }
            }
            ReportBody::Deputized(of) => Self::Deputized {
                home: node(of.home)?,
                incarnation: of.incarnation,
                version: of.version,
            },
            ReportBody::Dismissed(of) => {
                Self::Dismissed { home: node(of.home)?, incarnation: of.incarnation }
            }
            ReportBody::Free(of) => {
                let (home, pages) = parse_free_lines(of)?;
                Self::Free { home, pages }
            }
            ReportBody::Sealed(is_on) => Self::Sealed(is_on),
            ReportBody::Allowed(of) => Self::Allowed { migration, fences: parse_fences(of)? },
            ReportBody::Progress(of) => Self::Progress {
                migration,
                kept: parse_served(of.kept)?,
                on_the_way_count: of.on_the_way_count,
                in_doubt_count: of.in_doubt_count,
                free_count: of.free_count,
                is_done: of.is_done,
            },
            ReportBody::Settled(of) => Self::Settled { migration, kept: parse_served(of.kept)? },
            ReportBody::Refused(of) => {
                let why = parse_refusal(of.reason, of.words);
                Self::Refused { migration, order: parse_kind(of.step)?, why }
            }
            ReportBody::Done(step) => match parse_kind(step)? {
                OrderKind::Reserve => Self::Reserved(migration),
                OrderKind::Withdraw => Self::Withdrawn(migration),
                OrderKind::Forget => Self::Forgotten(migration),
                OrderKind::Release => Self::Released(migration),
                _ => return Err("this order has a report of its own"),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;

    /// The controller and servers refuse larger messages.
    #[test]
    fn the_most_rows_fit_a_message() {
        let most = ArenaGeneration::MAX;
        let generations = Generations { first: most, last: most };
        let end = 1_u64 << 36;
        let pages = end - 8..end;
        let rows = crate::ATTEND_ROWS_MAX;
        let home = Contents { node: NodeId(u16::MAX), generation: most };
        let served = vec![ServedRow { pages: pages.clone(), generations }; rows];
        let report = Report::Claims { home, round: 1, served, given: Vec::new(), lost: Vec::new() };
        let message = proto::MigrationReport::from(report);
        assert!(
            message.encoded_len() + 1024 < crate::ATTEND_BYTES_MAX,
            "{}",
            message.encoded_len()
        );
        let rows = vec![(pages, NodeId(u16::MAX)); rows];
        let order = Order::Learn(Elsewhere { home, version: 1, rows, lost: Vec::new() });
        let message = proto::MigrationOrder::from(order);
        assert!(
            message.encoded_len() + 1024 < crate::ATTEND_BYTES_MAX,
            "{}",
            message.encoded_len()
        );
    }

    fn samples() -> (Vec<Order>, Vec<Report>) {
        let generation = |number| ArenaGeneration::new(number).unwrap();
        let home = Contents { node: NodeId(1), generation: generation(4) };
        let other = Contents { node: NodeId(2), generation: generation(9) };
        let terms = Terms {
            migration: 7,
            range_epoch: 8,
            home,
            space: Space(3),
            pages: 8..24,
            giver: home,
            taker: other,
            taker_incarnation: 5,
        };
        let fences = vec![Fence { node: NodeId(0xfffe), incarnation: 6 }];
        let generations = Generations { first: generation(4), last: generation(5) };
        let kept = vec![ServedRow { pages: 8..16, generations }];
        let elsewhere = Elsewhere {
            home,
            version: 3,
            rows: vec![(0..8, NodeId(2)), (16..24, NodeId(3))],
            lost: vec![8..16, 32..48],
        };
        let deputyship = Deputyship {
            home: NodeId(1),
            incarnation: 6,
            space: Space(3),
            range_epoch: 7,
            last_generation: generation(9),
            idle: Duration::from_millis(1234),
            version: 5,
            contents: vec![generation(2), generation(4)],
            rows: vec![
                EarlierRow { generation: generation(2), pages: 0..8, at: Some(NodeId(2)) },
                EarlierRow { generation: generation(4), pages: 8..24, at: None },
            ],
        };
        let orders = vec![
            Order::Deputize(deputyship),
            Order::Discard { home, round: 5, pages: vec![0..8, 24..32] },
            Order::Dismiss { home: NodeId(1), incarnation: 6 },
            Order::Seal(true),
            Order::Seal(false),
            Order::Take { terms: terms.clone(), fences: fences.clone() },
            Order::Allow(terms.clone()),
            Order::Forget(7),
            Order::Learn(elsewhere),
            Order::Lose { node: NodeId(2), began: generation(11) },
            Order::Release(7),
            Order::Report { home, round: 12 },
            Order::Reserve(terms.clone()),
            Order::Settle(terms),
            Order::Withdraw(7),
        ];
        let refuse = |why| Report::Refused { migration: 7, order: OrderKind::Allow, why };
        let mut reports = vec![
            Report::Allowed { migration: 7, fences },
            Report::Claims {
                home,
                round: 12,
                served: kept.clone(),
                given: vec![0..8, 16..24],
                lost: vec![64..72, 80..88],
            },
            Report::Deputized { home: NodeId(1), incarnation: 6, version: 5 },
            Report::Dismissed { home: NodeId(1), incarnation: 6 },
            Report::Sealed(true),
            Report::Sealed(false),
            Report::Free { home, pages: vec![8..24, 32..40] },
            Report::Free { home, pages: Vec::new() },
            Report::Forgotten(7),
            Report::Learned { home, version: 3 },
            Report::Lost { node: NodeId(2), began: generation(11) },
            Report::Progress {
                migration: 7,
                kept: kept.clone(),
                on_the_way_count: 2,
                in_doubt_count: 1,
                free_count: 0,
                is_done: true,
            },
            Report::Released(7),
            Report::Reserved(7),
            Report::Settled { migration: 7, kept },
            Report::Withdrawn(7),
        ];
        reports.extend(
            [
                Refusal::Contradiction,
                Refusal::Full,
                Refusal::Late,
                Refusal::NoRoom,
                Refusal::Overlap,
                Refusal::Space,
                Refusal::Unknown,
                Refusal::Other("x".to_owned()),
            ]
            .map(refuse),
        );
        (orders, reports)
    }

    #[test]
    fn orders_and_reports_arrive_as_they_were() {
        let (orders, reports) = samples();
        for order in orders {
            let bytes = proto::MigrationOrder::from(order.clone()).encode_to_vec();
            let read = proto::MigrationOrder::decode(bytes.as_slice()).unwrap();
            assert_eq!(Order::try_from(read), Ok(order));
        }
        for report in reports {
            let bytes = proto::MigrationReport::from(report.clone()).encode_to_vec();
            let read = proto::MigrationReport::decode(bytes.as_slice()).unwrap();
            assert_eq!(Report::try_from(read), Ok(report));
        }
    }

    #[test]
    fn impossible_numbers_are_refused() {
        let with = |body| proto::MigrationReport { migration: 7, report: Some(body) };
        let bad = |row: proto::PageRow| {
            let settled = proto::MigrationSettled { kept: vec![row] };
            Report::try_from(with(ReportBody::Settled(settled))).is_err()
        };
        let row = proto::PageRow { first_page: 8, page_count: 8, ..proto::PageRow::default() };
        assert!(!bad(row));
        assert!(bad(proto::PageRow { page_count: 0, ..row }));
        assert!(bad(proto::PageRow { first_page: u64::MAX, ..row }));
        assert!(bad(proto::PageRow { last_generation: 0x8000, ..row }));
        let lost = proto::Contents { node: 0x1_0000, generation: 0 };
        assert!(Report::try_from(with(ReportBody::Lost(lost))).is_err());
        assert!(Report::try_from(with(ReportBody::Done(0))).is_err());
        assert!(Report::try_from(with(ReportBody::Done(99))).is_err());
        assert!(Report::try_from(proto::MigrationReport::default()).is_err());
        assert!(Order::try_from(proto::MigrationOrder::default()).is_err());
        let empty = proto::MigrationTerms::default();
        let reserve =
            proto::MigrationOrder { migration: 1, order: Some(OrderBody::Reserve(empty)) };
        assert!(Order::try_from(reserve).is_err());
    }

    proptest! {
        #[test]
        fn changed_bytes_never_panic(which in 0..40_usize, at in any::<prop::sample::Index>(), to in any::<u8>()) {
            let (orders, reports) = samples();
            let mut bytes = match reports.get(which) {
                Some(report) => proto::MigrationReport::from(report.clone()).encode_to_vec(),
                None => {
                    let order = orders[which % orders.len()].clone();
                    proto::MigrationOrder::from(order).encode_to_vec()
                }
            };
            let at = at.index(bytes.len());
            bytes[at] = to;
            let _ = proto::MigrationReport::decode(bytes.as_slice()).map(Report::try_from);
            let _ = proto::MigrationOrder::decode(bytes.as_slice()).map(Order::try_from);
        }
    }
}
