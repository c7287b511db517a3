//! What a run says, for people and for machines.

use std::fmt::Write as _;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use super::compare::Ratio;
use super::tally::{Tally, columns, quantile_ms, rounded};

/// One target's part of a run.
pub struct Part {
    /// `A`, `B`, `direct`, or what else it is called.
    pub name: &'static str,
    /// Where it is.
    pub url: String,
    /// What was counted.
    pub tally: Tally,
}

/// A run.
pub struct Report {
    /// The command line.
    pub command: String,
    /// Processor, kernel.
    pub machine: String,
    /// Of the generator.
    pub commit: Option<String>,
    /// One, or the two that are compared.
    pub parts: Vec<Part>,
    /// Second to first.
    pub ratios: Vec<(&'static str, Ratio)>,
}

/// The three distributions of a tally.
pub type Times = (&'static str, fn(&Tally) -> &Histogram<u64>);

/// Their names, unit last.
pub const TIMES: [Times; 3] = [
    ("first_byte_ms", |tally| &tally.first),
    ("gap_ms", |tally| &tally.gap),
    ("total_ms", |tally| &tally.total),
];

impl Report {
    /// Every answer was right, and there was one; or events, where all streams were cut at the end.
    pub fn is_good(&self) -> bool {
        self.parts.iter().all(|Part { tally, .. }| {
            tally.wrong_count() == 0 && (tally.good > 0 || tally.events > 0)
        })
    }

    /// Differences of quantiles, second less first, ms: what the second adds.
    fn added(&self) -> Vec<(&'static str, [Option<f64>; 4])> {
        let [first, second] = self.parts.as_slice() else {
            return Vec::new();
        };
        let one = |(name, of): &Times| {
            let (a, b) = (of(&first.tally), of(&second.tally));
            let quantile = |q| Some(quantile_ms(b, q)? - quantile_ms(a, q)?);
            let max =
                (!a.is_empty() && !b.is_empty()).then(|| (b.max() as f64 - a.max() as f64) / 1e6);
            (*name, [quantile(0.5), quantile(0.99), quantile(0.999), max])
        };
        TIMES.iter().map(one).collect()
    }

    /// For machines.
    pub fn json(&self) -> Value {
        let parts = self.parts.iter().map(|part| {
            let mut value = part.tally.json();
            value["name"] = part.name.into();
            value["url"] = part.url.clone().into();
            value
        });
        let ratios = self.ratios.iter().map(|(name, ratio)| {
            let interval = ratio.interval.map(|(low, high)| json!([rounded(low), rounded(high)]));
            let value = json!({"median": rounded(ratio.median), "interval_95": interval, "pairs": ratio.pairs});
            (name.to_string(), value)
        });
        let added = self.added().into_iter().map(|(name, values)| {
            let [p50, p99, p999, max] = values.map(|value| value.map(rounded));
            (
                name.to_string(),
                json!({"p50": p50, "p99": p99, "p999": p999, "max": max}),
            )
        });
        json!({
            "command": self.command, "machine": self.machine, "commit": self.commit, "is_good": self.is_good(),
            "targets": parts.collect::<Value>(),
            "second_to_first": ratios.collect::<serde_json::Map<_, _>>(),
            "added_ms": added.collect::<serde_json::Map<_, _>>(),
        })
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let commit = self.commit.as_deref().unwrap_or("unknown");
        let _ = writeln!(text, "machine: {}; commit: {commit}", self.machine);
        for part in &self.parts {
            text.push_str(&part.text());
        }
        if let [first, second] = self.parts.as_slice() {
            let _ = writeln!(
                text,
                "\n{} to {}, medians of pairs of slices:",
                second.name, first.name
            );
            for (name, ratio) in &self.ratios {
                let interval = match ratio.interval {
                    Some((low, high)) => format!("95 %: {low:.3} to {high:.3}"),
                    None => "too few pairs for an interval".to_owned(),
                };
                let _ = writeln!(
                    text,
                    "  {name:<20}{:>8.3}   {interval} ({} pairs)",
                    ratio.median, ratio.pairs
                );
            }
            let _ = writeln!(
                text,
                "\n{} less {}, ms:{:>12}{:>11}{:>11}{:>11}",
                second.name, first.name, "p50", "p99", "p99.9", "max"
            );
            for (name, values) in self.added() {
                let _ = writeln!(text, "  {name:<20}{}", values.map(cell).concat());
            }
        }
        text
    }
}

impl Part {
    fn text(&self) -> String {
        let tally = &self.tally;
        let mut text = String::new();
        let _ = writeln!(text, "\n{} {}", self.name, self.url);
        let json = tally.json();
        let _ = writeln!(
            text,
            "  {} requests, {} right, {} wrong; {} answers/s, {} events/s in {} s; at most {} connections",
            tally.asked,
            tally.good,
            tally.wrong_count(),
            json["answers_per_s"],
            json["events_per_s"],
            json["window_s"],
            tally.connections_max
        );
        for (what, count) in [
            (
                "were sent again, on a connection that had just been closed",
                tally.resent,
            ),
            ("were still running at the end and were cut", tally.cut),
        ] {
            if count > 0 {
                let _ = writeln!(text, "  {count} {what}");
            }
        }
        for (kind, count) in &tally.wrong {
            let _ = writeln!(text, "  WRONG {kind}: {count}");
        }
        for example in &tally.examples {
            let _ = writeln!(text, "    {example}");
        }
        let _ = writeln!(
            text,
            "{:<22}{:>11}{:>11}{:>11}{:>11}{:>11}{:>11}",
            "", "p50", "p90", "p99", "p99.9", "max", "mean"
        );
        for (name, of) in TIMES {
            if !of(tally).is_empty() {
                let cells = columns(of(tally)).map(|(_, value)| cell(value)).concat();
                let _ = writeln!(text, "  {name:<20}{cells}");
            }
        }
        for (what, value) in [
            ("answer", &json["cpu_us_per_answer"]),
            ("event", &json["cpu_us_per_event"]),
        ] {
            if !value.is_null() {
                let _ = writeln!(text, "  CPU us per {what} {value}");
            }
        }
        if let Some(bytes) = tally.rss_bytes {
            let _ = writeln!(text, "  resident memory {:.1} MB", bytes as f64 / 1e6);
        }
        let _ = writeln!(
            text,
            "  generator's core busy {:.0} %",
            tally.busy_share() * 100.0
        );
        for limit in tally.limits() {
            let _ = writeln!(text, "  LIMIT {limit}");
        }
        text
    }
}

fn cell(value: Option<f64>) -> String {
    // Events that came together are a nanosecond apart: nothing.
    let shown = |value: f64| {
        if value.abs() < 1e-4 {
            0.0
        } else {
            rounded(value)
        }
    };
    value.map_or_else(
        || format!("{:>11}", "-"),
        |value| format!("{:>11}", shown(value)),
    )
}

#[cfg(test)]
mod tests {
    use super::super::check::Wrong;
    use super::*;

    fn report(tally: Tally) -> Report {
        let part = Part {
            name: "target",
            url: "http://a".into(),
            tally,
        };
        Report {
            command: "x".into(),
            machine: "m".into(),
            commit: None,
            parts: vec![part],
            ratios: vec![],
        }
    }

    #[test]
    fn a_wrong_answer_and_none_at_all_are_no_success_and_are_said() {
        let good = Tally {
            good: 3,
            ..Tally::default()
        };
        assert!(report(good.clone()).is_good());
        assert!(
            report(Tally {
                events: 3,
                ..Tally::default()
            })
            .is_good(),
            "streams that were cut"
        );
        assert!(!report(Tally::default()).is_good());
        let mut wrong = good;
        wrong.add_wrong(&Wrong::NoDone, b"");
        wrong.unsent = 2;
        let report = report(wrong);
        assert!(!report.is_good());
        let text = report.text();
        assert!(
            text.contains("  WRONG no_done: 1\n") && text.contains("  LIMIT 2 requests"),
            "{text}"
        );
    }

    #[test]
    fn what_is_added_is_the_difference_of_quantiles() {
        let times = |from_ms: u64| {
            let mut tally = Tally::default();
            (1..=1000).for_each(|ms| tally.total.record((from_ms + ms) * 1_000_000).unwrap());
            tally
        };
        let mut report = report(times(0));
        report.parts.push(Part {
            name: "routed",
            url: "http://b".into(),
            tally: times(40),
        });
        let json = report.json();
        let added = |q: &str| json["added_ms"]["total_ms"][q].as_f64().unwrap();
        for q in ["p50", "p99", "max"] {
            assert!((added(q) - 40.0).abs() < 1.5, "{q}: {}", added(q));
        }
        assert!(
            json["added_ms"]["total_ms"]["p999"].is_null()
                && json["added_ms"]["gap_ms"]["p50"].is_null()
        );
    }
}
