//! Writing metric families: a thin layer over prometheus-client for values that are read at scrape time.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelValue, EncodeMetric, LabelValueEncoder, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use shards::HistogramSnapshot;

/// A label's value. Worker URLs are checked when they are registered: no quote, backslash or line end.
#[derive(Clone, Debug)]
pub enum Label {
    /// One of a fixed list.
    Fixed(&'static str),
    /// A worker's URL.
    Shared(Arc<str>),
    /// Of a bounded number.
    Number(u64),
}

impl Label {
    /// A rank.
    pub fn number(number: u32) -> Label {
        Label::Number(number.into())
    }
}

impl From<&'static str> for Label {
    fn from(text: &'static str) -> Label {
        Label::Fixed(text)
    }
}

impl EncodeLabelValue for Label {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> fmt::Result {
        match self {
            Label::Fixed(text) => text.encode(encoder),
            Label::Shared(text) => text.encode(encoder),
            Label::Number(number) => number.encode(encoder),
        }
    }
}

/// The page being written. Counters are named without `_total`: the format adds it.
pub struct Families<'e>(DescriptorEncoder<'e>);

impl<'e> Families<'e> {
    /// Writes to `encoder`.
    pub fn new(encoder: DescriptorEncoder<'e>) -> Families<'e> {
        Families(encoder)
    }

    /// A counter without labels.
    pub fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        ConstCounter::new(value).encode(self.0.encode_descriptor(
            name,
            help,
            None,
            MetricType::Counter,
        )?)
    }

    /// A gauge without labels.
    pub fn gauge(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        gauge_of(value).encode(
            self.0
                .encode_descriptor(name, help, None, MetricType::Gauge)?,
        )
    }

    /// A gauge in seconds, without labels.
    pub fn seconds(&mut self, name: &str, help: &str, ns: u64) -> fmt::Result {
        ConstGauge::new(seconds(ns)).encode(self.0.encode_descriptor(
            name,
            help,
            None,
            MetricType::Gauge,
        )?)
    }

    /// A counter for each set of labels.
    pub fn counters<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        values: impl Iterator<Item = ([(&'static str, Label); N], u64)>,
    ) -> fmt::Result {
        let encode = |metric: MetricEncoder<'_>, value| ConstCounter::new(value).encode(metric);
        self.family(name, help, MetricType::Counter, values, encode)
    }

    /// A gauge for each set of labels.
    pub fn gauges<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        values: impl Iterator<Item = ([(&'static str, Label); N], u64)>,
    ) -> fmt::Result {
        let encode = |metric: MetricEncoder<'_>, value| gauge_of(value).encode(metric);
        self.family(name, help, MetricType::Gauge, values, encode)
    }

    fn family<const N: usize, V>(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        values: impl Iterator<Item = ([(&'static str, Label); N], V)>,
        encode: impl Fn(MetricEncoder<'_>, V) -> fmt::Result,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, kind)?;
        for (labels, value) in values {
            encode(family.encode_family(&labels)?, value)?;
        }
        Ok(())
    }

    /// A histogram in seconds; nothing is written where there is no core to have counted.
    pub fn histogram(
        &mut self,
        name: &str,
        help: &str,
        snapshot: Option<&HistogramSnapshot>,
    ) -> fmt::Result {
        self.histogram_in(name, help, snapshot, seconds)
    }

    /// The same of numbers that are no times.
    pub fn histogram_of_counts(
        &mut self,
        name: &str,
        help: &str,
        snapshot: Option<&HistogramSnapshot>,
    ) -> fmt::Result {
        self.histogram_in(name, help, snapshot, |count| count as f64)
    }

    /// A histogram in seconds for each set of labels.
    pub fn histograms<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        values: impl Iterator<Item = ([(&'static str, Label); N], HistogramSnapshot)>,
    ) -> fmt::Result {
        self.family(
            name,
            help,
            MetricType::Histogram,
            values,
            |metric, snapshot| write(metric, &snapshot, seconds),
        )
    }

    fn histogram_in(
        &mut self,
        name: &str,
        help: &str,
        snapshot: Option<&HistogramSnapshot>,
        unit: fn(u64) -> f64,
    ) -> fmt::Result {
        let Some(snapshot) = snapshot else {
            return Ok(());
        };
        let metric = self
            .0
            .encode_descriptor(name, help, None, MetricType::Histogram)?;
        write(metric, snapshot, unit)
    }
}

fn write(
    mut metric: MetricEncoder<'_>,
    snapshot: &HistogramSnapshot,
    unit: fn(u64) -> f64,
) -> fmt::Result {
    let mut bounds = snapshot.bounds.iter().map(|bound| unit(*bound));
    // The library writes +Inf for f64::MAX, and adds the counts up itself.
    let buckets: Vec<(f64, u64)> = snapshot
        .counts
        .iter()
        .map(|count| (bounds.next().unwrap_or(f64::MAX), *count))
        .collect();
    metric.encode_histogram::<NoLabelSet>(unit(snapshot.sum_ns), snapshot.count, &buckets, None)
}

fn gauge_of(value: u64) -> ConstGauge<i64> {
    ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX))
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Adds up the cores' histograms, which have the same bounds. The count is that of the buckets, so that a scrape in the
/// middle of a record still adds up.
pub fn merge(snapshots: impl Iterator<Item = HistogramSnapshot>) -> Option<HistogramSnapshot> {
    let mut sum = snapshots.reduce(|mut sum, other| {
        for (count, more) in sum.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        sum.sum_ns = sum.sum_ns.saturating_add(other.sum_ns);
        sum
    })?;
    sum.count = sum.counts.iter().sum();
    Some(sum)
}

/// OpenMetrics text as the older text format 0.0.4, for scrapers that do not ask for OpenMetrics: there a counter's
/// `HELP` and `TYPE` lines bear the name of its samples, `_total` included, and there is no `EOF` mark.
pub fn classic(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 1024);
    let mut help: Option<&str> = None;
    for line in text.lines().filter(|line| *line != "# EOF") {
        if line.starts_with("# HELP ") {
            help = Some(line);
            continue;
        }
        let suffix = if line.starts_with("# TYPE ") && line.ends_with(" counter") {
            "_total"
        } else {
            ""
        };
        for described in help.take().into_iter().chain([line]) {
            out.push_str(&renamed(described, suffix));
            out.push('\n');
        }
    }
    out
}

/// Puts `suffix` behind the name in `# HELP name ...` or `# TYPE name ...`.
fn renamed<'l>(line: &'l str, suffix: &str) -> Cow<'l, str> {
    let name_end = line.match_indices(' ').nth(2).map(|(at, _)| at);
    match name_end {
        Some(at) if !suffix.is_empty() => {
            Cow::Owned(format!("{}{suffix}{}", &line[..at], &line[at..]))
        }
        _ => Cow::Borrowed(line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_format_names_counters_as_their_samples() {
        let text = "# HELP a_b Some help.\n# TYPE a_b counter\na_b_total{x=\"1\"} 2\n# HELP g Gauge.\n# TYPE g gauge\ng 1\n# EOF\n";
        assert_eq!(
            classic(text),
            "# HELP a_b_total Some help.\n# TYPE a_b_total counter\na_b_total{x=\"1\"} 2\n# HELP g Gauge.\n# TYPE g gauge\ng 1\n"
        );
    }

    #[test]
    fn histograms_of_cores_add_up() {
        static BOUNDS: [u64; 2] = [10, 20];
        let snapshot = |counts: Vec<u64>, sum_ns| HistogramSnapshot {
            bounds: &BOUNDS,
            count: 99,
            counts,
            sum_ns,
        };
        let sum =
            merge([snapshot(vec![1, 2, 3], 100), snapshot(vec![10, 0, 1], 7)].into_iter()).unwrap();
        assert_eq!(
            (sum.counts, sum.sum_ns, sum.count),
            (vec![11, 2, 4], 107, 17)
        );
        assert!(merge(std::iter::empty()).is_none());
    }
}
