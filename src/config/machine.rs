//! What the machine allows: read from `/proc` once, at start. Nothing here needs `unsafe`.

use std::fs;

/// A soft and a hard limit; `None`: unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// In force.
    pub soft: Option<u64>,
    /// What the process may raise it to.
    pub hard: Option<u64>,
}

/// Open files of this process, or `None` where `/proc` is not there.
pub fn descriptor_limits() -> Option<Limit> {
    limit("Max open files")
}

/// A line of `/proc/self/limits`, by its name (proc(5)).
pub fn limit(name: &str) -> Option<Limit> {
    limit_in(&fs::read_to_string("/proc/self/limits").ok()?, name)
}

fn limit_in(table: &str, name: &str) -> Option<Limit> {
    let rest = table.lines().find_map(|line| line.strip_prefix(name))?;
    let mut words = rest.split_whitespace();
    let mut value = || match words.next()? {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    };
    Some(Limit {
        soft: value()?,
        hard: value()?,
    })
}

/// Client connections that the descriptor limit allows. The hard limit counts: `main` raises the soft one to it.
pub fn connection_count_max() -> usize {
    let open_files_max = descriptor_limits().map_or(1024, |limit| limit.hard.unwrap_or(u64::MAX));
    connections_of(open_files_max)
}

/// Each exchange may need a descriptor on both sides. A twentieth (at least 128) is left for listeners, probes,
/// scrapes and connections kept for reuse.
pub fn connections_of(open_files_max: u64) -> usize {
    let reserved = (open_files_max / 20).max(128);
    usize::try_from((open_files_max.saturating_sub(reserved) / 2).clamp(16, 4_000_000))
        .unwrap_or(16)
}

/// CPUs this process may use (affinity, hence cpusets of containers, respected).
pub fn cpu_count() -> usize {
    core_affinity::get_core_ids().map_or(1, |ids| ids.len().max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_read_from_the_table() {
        let table = "Limit                     Soft Limit           Hard Limit           Units     \n\
                     Max locked memory         8388608              unlimited            bytes     \n\
                     Max open files            20000                524288               files     \n";
        assert_eq!(
            limit_in(table, "Max open files"),
            Some(Limit {
                soft: Some(20000),
                hard: Some(524_288)
            })
        );
        assert_eq!(
            limit_in(table, "Max locked memory"),
            Some(Limit {
                soft: Some(8_388_608),
                hard: None
            })
        );
        assert_eq!(limit_in(table, "Max nothing"), None);
    }

    #[test]
    fn twenty_thousand_descriptors_serve_9500_streams() {
        assert_eq!(connections_of(20_000), 9_500);
        assert_eq!(connections_of(1024), 448);
        assert_eq!(connections_of(0), 16);
    }
}
