//! What others published for the same programs, as the time divided by that in plain memory.

use bluebridge_bench::workout::Workout;
use serde::Serialize;

/// A published figure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Published {
    pub(super) system: &'static str,
    pub(super) ratio: f64,
    /// Where it stands.
    place: &'static str,
}

/// The setting of a figure.
struct Setting {
    workout: Workout,
    copies: u16,
    /// `None`: the publication does not say.
    servers: Option<u16>,
    local_percent: u8,
    figure: Published,
}

/// HPBD is from Liang, Noronha, Panda: "Exploiting Remote Memory in InfiniBand Clusters using a High Performance
/// Network Block Device", OSU-CISRC-5/05-TR36, 2005. Data of 1 GB with 512 MB of local memory count as 50 % (its
/// section 6.1).
///
/// Its Barnes (Figure 9) and several servers (Figure 11) are images; the text has no numbers for them. Infiniswap
/// (NSDI 2017) was measured with VoltDB, Memcached, PowerGraph, GraphX and Spark, and with none of these programs.
const PUBLISHED: [Setting; 4] = [
    // 5.8 s and 8.4 s.
    hpbd(Workout::Testswap, 1, 50, 1.45, "section 6.2, Figure 6"),
    // 94 s and 138 s. The abstract says 1.45.
    hpbd(Workout::Quicksort, 1, 50, 1.47, "section 6.3.1, Figure 8"),
    hpbd(Workout::Quicksort, 2, 50, 1.7, "section 6.3.2, Figure 10"),
    hpbd(Workout::Quicksort, 2, 25, 2.5, "section 6.3.2, Figure 10"),
];

const fn hpbd(
    workout: Workout,
    copies: u16,
    local_percent: u8,
    ratio: f64,
    place: &'static str,
) -> Setting {
    Setting {
        workout,
        copies,
        // The report does not say how many servers two copies had.
        servers: if copies == 1 { Some(1) } else { None },
        local_percent,
        figure: Published { system: "HPBD", ratio, place },
    }
}

/// What was published for a setting.
pub(super) fn find(
    workout: Workout,
    copies: u16,
    servers: u16,
    local_percent: u8,
) -> Vec<Published> {
    let fits = |setting: &&Setting| {
        (setting.workout, setting.copies, setting.local_percent) == (workout, copies, local_percent)
            && setting.servers.is_none_or(|count| count == servers)
    };
    PUBLISHED.iter().filter(fits).map(|setting| setting.figure).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_belongs_to_its_setting_only() {
        let ratios = |workout, copies, servers, local| -> Vec<f64> {
            find(workout, copies, servers, local).iter().map(|figure| figure.ratio).collect()
        };
        assert_eq!(ratios(Workout::Testswap, 1, 1, 50), [1.45]);
        assert_eq!(ratios(Workout::Quicksort, 1, 1, 50), [1.47]);
        assert_eq!(ratios(Workout::Quicksort, 2, 1, 25), [2.5]);
        assert_eq!(ratios(Workout::Quicksort, 2, 4, 50), [1.7]);
        for (workout, copies, servers, local) in [
            (Workout::Quicksort, 1, 1, 25),
            (Workout::Quicksort, 1, 2, 50),
            (Workout::Quicksort, 3, 1, 50),
            (Workout::Testswap, 2, 1, 50),
            (Workout::BarnesHut, 1, 1, 50),
        ] {
            assert!(find(workout, copies, servers, local).is_empty(), "{workout:?} {copies}");
        }
    }
}
