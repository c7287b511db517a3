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
    /// Every answer was right, and there was one.
    pub fn is_good(&self) -> bool {
        self.parts
            .iter()
            .all(|part| part.tally.wrong_count() == 0 && part.tally.good > 0)
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
                "\n{} less {}, ms:{:>13}{:>10}{:>10}{:>10}",
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
            "{:<22}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}",
            "", "p50", "p90", "p99", "p99.9", "max", "mean"
        );
        for (name, of) in TIMES {
            if !of(tally).is_empty() {
                let cells = columns(of(tally)).map(|(_, value)| cell(value)).concat();
                let _ = writeln!(text, "  {name:<20}{cells}");
            }
        }
        if tally.cpu_ns.is_some() {
            let _ = writeln!(
                text,
                "  CPU us per answer {}, per event {}",
                json["cpu_us_per_answer"], json["cpu_us_per_event"]
            );
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
    value.map_or_else(
        || format!("{:>10}", "-"),
        |value| format!("{:>10}", rounded(value)),
    )
}
