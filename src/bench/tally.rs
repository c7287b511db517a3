//! What is counted of a slice, and what it says: of the target, and of the generator itself.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};

use super::check::Wrong;

/// Three digits, up to an hour in ns: 0.1 % of each value.
fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 3_600_000_000_000, 3).expect("the bounds are good ones")
}

/// A send that begins this much after it was due is late.
pub const LATE_NS: u64 = 1_000_000;
/// Of the generator's core: busier, and it measures itself.
const BUSY_SHARE_MAX: f64 = 0.9;
/// Late or taken away: more, and the figures are not the target's alone.
const SHARE_MAX: f64 = 0.01;
/// Share of the time in which others had the generator's core while it had work.
const TAKEN_SHARE_MAX: f64 = 0.05;
/// Wrong answers that are shown.
const EXAMPLES_MAX: usize = 3;

/// Times and counts. Those of several slices and threads add up.
#[derive(Clone, Debug)]
pub struct Tally {
    /// From when a request was due to the first byte of its answer, ns.
    pub first: Histogram<u64>,
    /// Between two events of a stream, ns.
    pub gap: Histogram<u64>,
    /// From when a request was due to the last byte of its answer, ns.
    pub total: Histogram<u64>,
    /// Requests that were due in the window.
    pub asked: u64,
    /// Of these, answered right.
    pub good: u64,
    /// Answered wrong, or not at all, at any time; by kind.
    pub wrong: BTreeMap<String, u64>,
    /// What some of them were.
    pub examples: Vec<String>,
    /// Right answers that ended in the window, whenever they began.
    pub answers: u64,
    /// Events that came in the window.
    pub events: u64,
    /// Sent once more, as a kept connection had just been closed.
    pub resent: u64,
    /// Streams that were still running when time was over, and were cut.
    pub cut: u64,
    /// Requests that were due and never sent.
    pub unsent: u64,
    /// Sends that began more than 1 ms after they were due, through the generator's own fault.
    pub late: u64,
    /// Sends that waited for one of `--connections-max` connections.
    pub waited: u64,
    /// Connections open at once.
    pub connections_max: u64,
    /// Length of the window, ns; of several slices their sum. Threads run side by side.
    pub window_ns: u64,
    /// CPU time of the generator's threads in it, and time for which they were ready and did not run, ns; of one thread.
    pub busy_ns: u64,
    /// See `busy_ns`.
    pub taken_ns: u64,
    /// CPU time of the target in it, ns, if its process is known.
    pub cpu_ns: Option<u64>,
    /// Its resident memory at the end, bytes.
    pub rss_bytes: Option<u64>,
}

impl Default for Tally {
    fn default() -> Tally {
        Tally {
            first: histogram(),
            gap: histogram(),
            total: histogram(),
            asked: 0,
            good: 0,
            wrong: BTreeMap::new(),
            examples: Vec::new(),
            answers: 0,
            events: 0,
            resent: 0,
            cut: 0,
            unsent: 0,
            late: 0,
            waited: 0,
            connections_max: 0,
            window_ns: 0,
            busy_ns: 0,
            taken_ns: 0,
            cpu_ns: None,
            rss_bytes: None,
        }
    }
}

/// A measure of a slice: its name, unit last, and its value, if the slice has one.
pub type Measure = (&'static str, fn(&Tally) -> Option<f64>);

/// What two targets are compared by.
pub const MEASURES: [Measure; 9] = [
    ("answers_per_s", |tally| {
        Some(tally.per_s(tally.answers)).filter(|rate| *rate > 0.0)
    }),
    ("first_byte_p50_ms", |tally| quantile_ms(&tally.first, 0.5)),
    ("first_byte_p99_ms", |tally| quantile_ms(&tally.first, 0.99)),
    ("total_p50_ms", |tally| quantile_ms(&tally.total, 0.5)),
    ("total_p99_ms", |tally| quantile_ms(&tally.total, 0.99)),
    ("gap_p50_ms", |tally| quantile_ms(&tally.gap, 0.5)),
    ("gap_p99_ms", |tally| quantile_ms(&tally.gap, 0.99)),
    ("cpu_us_per_answer", |tally| tally.cpu_us_per(tally.answers)),
    ("cpu_us_per_event", |tally| tally.cpu_us_per(tally.events)),
];

/// A quantile, ms; `None` where it would be the largest value or nearly so: of 100 values none has a p99.
pub fn quantile_ms(histogram: &Histogram<u64>, q: f64) -> Option<f64> {
    let beyond = histogram.len() as f64 * (1.0 - q);
    (beyond >= 2.0).then(|| histogram.value_at_quantile(q) as f64 / 1e6)
}

impl Tally {
    /// Counts a wrong answer.
    pub fn add_wrong(&mut self, wrong: &Wrong, text: &[u8]) {
        *self.wrong.entry(wrong.kind()).or_default() += 1;
        if self.examples.len() < EXAMPLES_MAX {
            let text = String::from_utf8_lossy(&text[..text.len().min(200)]);
            self.examples
                .push(format!("{wrong:?} {text}").trim_end().to_owned());
        }
    }

    /// All that were wrong.
    pub fn wrong_count(&self) -> u64 {
        self.wrong.values().sum()
    }

    /// Adds another slice of the same target, later (its window is added), or another thread's part of the same one.
    pub fn add(&mut self, other: &Tally, is_same_slice: bool) {
        self.first += &other.first;
        self.gap += &other.gap;
        self.total += &other.total;
        for (kind, count) in &other.wrong {
            *self.wrong.entry(kind.clone()).or_default() += count;
        }
        let room = EXAMPLES_MAX - self.examples.len();
        self.examples
            .extend(other.examples.iter().take(room).cloned());
        for (sum, part) in [
            (&mut self.asked, other.asked),
            (&mut self.good, other.good),
            (&mut self.answers, other.answers),
            (&mut self.events, other.events),
            (&mut self.resent, other.resent),
            (&mut self.cut, other.cut),
            (&mut self.unsent, other.unsent),
            (&mut self.late, other.late),
            (&mut self.waited, other.waited),
        ] {
            *sum += part;
        }
        if is_same_slice {
            // The busiest thread is the one that limits.
            self.connections_max += other.connections_max;
            self.window_ns = self.window_ns.max(other.window_ns);
            self.busy_ns = self.busy_ns.max(other.busy_ns);
            self.taken_ns = self.taken_ns.max(other.taken_ns);
        } else {
            self.connections_max = self.connections_max.max(other.connections_max);
            self.window_ns += other.window_ns;
            self.busy_ns += other.busy_ns;
            self.taken_ns += other.taken_ns;
        }
        self.cpu_ns = match (self.cpu_ns, other.cpu_ns) {
            (Some(a), Some(b)) => Some(a + b),
            (a, b) => a.or(b),
        };
        self.rss_bytes = self.rss_bytes.max(other.rss_bytes);
    }

    fn per_s(&self, count: u64) -> f64 {
        count as f64 / (self.window_ns.max(1) as f64 / 1e9)
    }

    fn cpu_us_per(&self, count: u64) -> Option<f64> {
        let cpu_ns = self.cpu_ns.filter(|_| count > 0)?;
        Some(cpu_ns as f64 / 1e3 / count as f64)
    }

    /// Share of the window in which the generator's busiest thread ran.
    pub fn busy_share(&self) -> f64 {
        self.busy_ns as f64 / self.window_ns.max(1) as f64
    }

    /// Why these figures may be the generator's own, in words; empty: they are the target's.
    pub fn limits(&self) -> Vec<String> {
        let mut all = Vec::new();
        if self.busy_share() > BUSY_SHARE_MAX {
            all.push(format!(
                "the generator's core was busy for {:.0} % of the time: it may be the limit (more --threads, or less load)",
                self.busy_share() * 100.0
            ));
        }
        let share = |count: u64| count as f64 / self.asked.max(1) as f64;
        if share(self.late) > SHARE_MAX {
            all.push(format!(
                "{} of {} requests were sent more than 1 ms after they were due: the generator did not keep its times",
                self.late, self.asked
            ));
        }
        let taken = self.taken_ns as f64 / self.window_ns.max(1) as f64;
        if taken > TAKEN_SHARE_MAX {
            all.push(format!(
                "others had the generator's core for {:.0} % of the time while it had work",
                taken * 100.0
            ));
        }
        if share(self.waited) > SHARE_MAX {
            all.push(format!(
                "{} of {} requests waited for one of --connections-max connections (their times count from when they were due)",
                self.waited, self.asked
            ));
        }
        if self.unsent > 0 {
            all.push(format!(
                "{} requests were due and never sent: they are in no figure",
                self.unsent
            ));
        }
        all
    }

    /// For machines.
    pub fn json(&self) -> Value {
        let times = |histogram: &Histogram<u64>| {
            let mut times = Map::new();
            times.insert("count".into(), histogram.len().into());
            for (name, value) in columns(histogram) {
                times.insert(
                    name.into(),
                    value.map_or(Value::Null, |ms| json!(rounded(ms))),
                );
            }
            Value::from(times)
        };
        json!({
            "asked": self.asked, "good": self.good, "wrong": self.wrong, "examples": self.examples,
            "answers": self.answers, "events": self.events, "resent": self.resent, "cut": self.cut,
            "unsent": self.unsent, "late": self.late, "waited": self.waited, "connections_max": self.connections_max,
            "window_s": rounded(self.window_ns as f64 / 1e9),
            "answers_per_s": rounded(self.per_s(self.answers)), "events_per_s": rounded(self.per_s(self.events)),
            "first_byte_ms": times(&self.first), "gap_ms": times(&self.gap), "total_ms": times(&self.total),
            "cpu_us_per_answer": self.cpu_us_per(self.answers).map(rounded),
            "cpu_us_per_event": self.cpu_us_per(self.events).map(rounded),
            "rss_bytes": self.rss_bytes,
            "generator": {"busy_share": rounded(self.busy_share()), "limits": self.limits()},
        })
    }
}

/// Quantiles, mean and maximum of times, ms.
pub fn columns(histogram: &Histogram<u64>) -> [(&'static str, Option<f64>); 6] {
    let is_there = !histogram.is_empty();
    [
        ("p50", quantile_ms(histogram, 0.5)),
        ("p90", quantile_ms(histogram, 0.9)),
        ("p99", quantile_ms(histogram, 0.99)),
        ("p999", quantile_ms(histogram, 0.999)),
        ("max", is_there.then(|| histogram.max() as f64 / 1e6)),
        ("mean", is_there.then(|| histogram.mean() / 1e6)),
    ]
}

/// Four digits are all that is meant.
pub fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powi(3 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_values_and_missing_where_there_are_too_few() {
        let mut tally = Tally::default();
        (1..=1000u64).for_each(|ms| tally.total.record(ms * 1_000_000).unwrap());
        let value = |q| quantile_ms(&tally.total, q);
        for (q, wanted) in [(0.5, 500.0), (0.9, 900.0), (0.99, 990.0)] {
            assert!(
                (value(q).unwrap() / wanted - 1.0).abs() < 0.002,
                "{q}: {:?}",
                value(q)
            );
        }
        assert_eq!(value(0.999), None, "of 1,000 values one is beyond it");
        assert_eq!(quantile_ms(&Tally::default().first, 0.5), None);
        let [.., ("max", Some(max)), _] = columns(&tally.total) else {
            panic!()
        };
        assert!((max / 1000.0 - 1.0).abs() < 0.002, "{max}");
    }

    #[test]
    fn windows_of_slices_add_up_and_those_of_threads_are_one() {
        let part = |busy_ns| Tally {
            answers: 10,
            window_ns: 1_000_000_000,
            busy_ns,
            connections_max: 4,
            cpu_ns: Some(500_000),
            ..Tally::default()
        };
        let mut slice = part(100);
        slice.add(
            &Tally {
                cpu_ns: None,
                ..part(900_000_001)
            },
            true,
        );
        assert_eq!(
            (slice.answers, slice.connections_max, slice.busy_ns),
            (20, 8, 900_000_001)
        );
        assert_eq!(MEASURES[0].1(&slice), Some(20.0));
        assert_eq!(MEASURES[7].1(&slice), Some(25.0));
        let mut all = Tally::default();
        all.add(&slice, false);
        all.add(&slice, false);
        assert_eq!(
            (MEASURES[0].1(&all), MEASURES[7].1(&all)),
            (Some(20.0), Some(25.0))
        );
        assert_eq!(all.limits().len(), 1, "{:?}", all.limits());
    }

    #[test]
    fn the_generator_says_when_it_is_the_limit() {
        let good = Tally {
            asked: 1000,
            window_ns: 1_000_000_000,
            busy_ns: 800_000_000,
            late: 10,
            ..Tally::default()
        };
        assert_eq!(good.limits(), Vec::<String>::new());
        for wrong in [
            Tally {
                busy_ns: 910_000_000,
                ..good.clone()
            },
            Tally {
                late: 11,
                ..good.clone()
            },
            Tally {
                waited: 11,
                ..good.clone()
            },
            Tally {
                taken_ns: 51_000_000,
                ..good.clone()
            },
            Tally {
                unsent: 1,
                ..good.clone()
            },
        ] {
            assert_eq!(wrong.limits().len(), 1, "{wrong:?}");
        }
    }

    #[test]
    fn wrong_answers_are_counted_by_kind() {
        let mut tally = Tally::default();
        (0..5).for_each(|_| tally.add_wrong(&Wrong::Status(503), b"{\"error\":1}"));
        tally.add_wrong(&Wrong::NoDone, b"");
        let mut all = Tally::default();
        all.add(&tally, false);
        assert_eq!(
            (
                all.wrong_count(),
                all.wrong["status_503"],
                all.wrong["no_done"]
            ),
            (6, 5, 1)
        );
        assert_eq!(
            (all.examples.len(), all.examples[0].as_str()),
            (3, "Status(503) {\"error\":1}")
        );
    }

    #[test]
    fn four_digits_are_kept() {
        for (value, wanted) in [
            (123_456.0, 123_500.0),
            (0.001_234_56, 0.001_235),
            (0.0, 0.0),
            (-2.345_67, -2.346),
        ] {
            assert!((rounded(value) - wanted).abs() < 1e-9, "{value}");
        }
    }
}
