//! One page that needs nothing but itself: policy against policy, distributions, and each worker over time, as inline SVG.

use std::fmt::Write as _;

use super::agenda::secs;
use super::tally::{Outcome, Point};
use crate::plot::{Frame, Line, escape};

const COLOURS: [&str; 10] = [
    "#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#c92a2a", "#5c940d", "#1864ab", "#e67700",
    "#087f5b", "#495057",
];
const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1080px;padding:0 1em;color:#212529}\
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}table{border-collapse:collapse;width:100%}\
td,th{padding:.3em .6em;text-align:right;border-bottom:1px solid #dee2e6}td:first-child,th:first-child{text-align:left}\
svg{width:100%;height:auto;background:#fff}figure{margin:1em 0}figcaption{color:#495057;font-size:.92em}\
.row{display:grid;grid-template-columns:1fr 1fr;gap:1em}text{font:11px system-ui,sans-serif;fill:#495057}";

const WORDS: &str = "<p><small>Hit rate: prompt tokens that the worker had computed before and kept. TTFT: time to the first token of \
an answer; ITL: time between two tokens; p50, p99: half, 99 of 100 are below. Queue: requests whose prompt waits or is computed, \
mean. Imbalance: the busiest worker's requests over the mean, 1 is even. All but the plots over time: while the fleet is full, if the \
run says so.</small></p>";

/// Two stand side by side.
const FRAME: Frame = Frame {
    width: W,
    height: 230.0,
    left: 52.0,
    right: 26.0,
    top: 12.0,
    bottom: 34.0,
};
const W: f64 = 520.0;

/// The page.
pub fn html(title: &str, about: &str, outcomes: &[Outcome]) -> String {
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{0}</title><style>{STYLE}</style><h1>{0}</h1><p>{1}</p>",
        escape(title),
        escape(about)
    );
    page.push_str(&summary(outcomes));
    page.push_str(WORDS);
    page.push_str("<h2>Policy against policy</h2><div class=\"row\">");
    type Measure = (&'static str, fn(&Outcome) -> f64);
    let bars: [Measure; 4] = [
        (
            "Prompt tokens that were not cached and had to be computed, % of all (less is better)",
            |o| (1.0 - o.hit_rate()) * 100.0,
        ),
        (
            "Requests that end, per second (more is better)",
            Outcome::requests_per_s,
        ),
        (
            "Requests whose prompt waits or is computed, mean (less is better)",
            Outcome::queue_depth,
        ),
        (
            "Time to the first token, 99th percentile, seconds (less is better)",
            |o| o.first_quantile(0.99),
        ),
    ];
    for (caption, value) in bars {
        page.push_str(&bar_chart(caption, outcomes, value));
    }
    page.push_str("</div><h2>Distributions</h2><div class=\"row\">");
    let first = lines(outcomes, |o| cdf(|q| o.first_quantile(q)));
    page.push_str(&plot(
        "Requests that have their first token after so many seconds, %",
        "seconds",
        &first,
        100.0,
    ));
    let steps = lines(outcomes, |o| cdf(|q| o.step_quantile(q) * 1e3));
    page.push_str(&plot(
        "Tokens that came at most so many milliseconds after the one before, %",
        "milliseconds",
        &steps,
        100.0,
    ));
    page.push_str("</div><h2>Each worker over time</h2><p>A line for each worker. The same scale under all policies.</p>");
    for outcome in outcomes {
        let _ = write!(
            page,
            "<h3>{}</h3><div class=\"row\">",
            escape(&outcome.policy)
        );
        let names = if outcome.workers.len() > 1 {
            ["prefill", "decode"]
        } else {
            ["worker", ""]
        };
        for (pool, name) in names.iter().enumerate().take(outcome.workers.len()) {
            let value = |point: &Point| f64::from(point.in_flight);
            page.push_str(&plot(
                &format!("Requests in flight, {name} workers"),
                "seconds",
                &series(outcome, pool, value),
                most(outcomes, pool, value),
            ));
        }
        let value = |point: &Point| point.computed_per_s / 1e3;
        page.push_str(&plot(
            "Thousand prompt tokens computed per second",
            "seconds",
            &series(outcome, 0, value),
            most(outcomes, 0, value),
        ));
        page.push_str("</div>");
    }
    page
}

fn summary(outcomes: &[Outcome]) -> String {
    let mut table = "<table><tr><th>policy<th>hit rate<th>requests/s<th>output tokens/s<th>TTFT p50<th>TTFT p99<th>ITL p50<th>queue<th>imbalance<th>completed after</tr>".to_string();
    for outcome in outcomes {
        let _ = write!(
            table,
            "<tr><td>{}<td>{:.1} %<td>{:.2}<td>{:.0}<td>{:.2} s<td>{:.2} s<td>{:.0} ms<td>{:.0}<td>{:.2}<td>{:.0} s</tr>",
            escape(&outcome.policy),
            outcome.hit_rate() * 100.0,
            outcome.requests_per_s(),
            outcome.output_per_s(),
            outcome.first_quantile(0.5),
            outcome.first_quantile(0.99),
            outcome.step_quantile(0.5) * 1e3,
            outcome.queue_depth(),
            outcome.imbalance,
            secs(outcome.whole),
        );
    }
    table + "</table>"
}

fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}

fn lines(outcomes: &[Outcome], points: impl Fn(&Outcome) -> Vec<(f64, f64)>) -> Vec<Line> {
    let line = |(index, outcome): (usize, &Outcome)| Line {
        name: outcome.policy.clone(),
        colour: colour(index),
        points: points(outcome),
    };
    outcomes.iter().enumerate().map(line).collect()
}

fn cdf(quantile: impl Fn(f64) -> f64) -> Vec<(f64, f64)> {
    let shares = (0..=100).map(|percent| f64::from(percent) / 100.0);
    shares
        .filter(|share| *share <= 0.99)
        .map(|share| (quantile(share), share * 100.0))
        .collect()
}

fn series(outcome: &Outcome, pool: usize, value: impl Fn(&Point) -> f64) -> Vec<Line> {
    // A few hundred points are all that can be seen.
    let every = outcome.series.len().div_ceil(400).max(1);
    let count = outcome.workers[pool].len();
    let line = |worker: usize| Line {
        name: format!("worker {worker}"),
        colour: colour(worker),
        points: outcome
            .series
            .iter()
            .step_by(every)
            .map(|(at, pools)| (secs(*at), value(&pools[pool][worker])))
            .collect(),
    };
    (0..count).map(line).collect()
}

/// The greatest value under any policy.
fn most(outcomes: &[Outcome], pool: usize, value: impl Fn(&Point) -> f64) -> f64 {
    let points = outcomes.iter().flat_map(|outcome| &outcome.series);
    let points = points.flat_map(|(_, pools)| &pools[pool]);
    points.map(value).fold(0.0, f64::max)
}

/// The step between round numbers of which some four or five come to `most`.
fn round_step(most: f64) -> f64 {
    let decade = 10_f64.powf((most / 4.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * decade);
    steps
        .into_iter()
        .find(|step| most / step <= 5.0)
        .unwrap_or(most)
}

fn bar_chart(caption: &str, outcomes: &[Outcome], value: fn(&Outcome) -> f64) -> String {
    let most = outcomes.iter().map(value).fold(0.0, f64::max).max(1e-9);
    let height = outcomes.len() as f64 * 24.0 + 8.0;
    let mut svg =
        format!("<figure><figcaption>{caption}</figcaption><svg viewBox=\"0 0 {W} {height}\">");
    for (index, outcome) in outcomes.iter().enumerate() {
        let (y, x) = (index as f64 * 24.0 + 4.0, 180.0);
        let width = (value(outcome) / most * (W - x - 60.0)).max(1.0);
        let _ = write!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text><rect x=\"{x}\" y=\"{y}\" width=\"{width:.1}\" height=\"17\" fill=\"{}\"/><text x=\"{}\" y=\"{}\">{}</text>",
            x - 6.0,
            y + 13.0,
            escape(&outcome.policy),
            colour(index),
            x + width + 5.0,
            y + 13.0,
            short(value(outcome)),
        );
    }
    svg + "</svg></figure>"
}

/// `y_max`: where the scale ends.
fn plot(caption: &str, x_name: &str, lines: &[Line], y_max: f64) -> String {
    let all = || lines.iter().flat_map(|line| &line.points);
    let x_max = all().map(|point| point.0).fold(0.0, f64::max).max(1e-9);
    let y_max = y_max.max(1e-9);
    let x = |value: f64| FRAME.left + value / x_max * FRAME.inner_width();
    let y = |value: f64| FRAME.height - FRAME.bottom - value / y_max * FRAME.inner_height();
    let mut svg = FRAME.begin(caption);
    let ticks = |most: f64| {
        let step = round_step(most);
        (0..)
            .map(move |n| f64::from(n) * step)
            .take_while(move |at| *at <= most * 1.0001)
    };
    for tick in ticks(y_max) {
        FRAME.level(&mut svg, y(tick), &plain(tick));
    }
    for tick in ticks(x_max) {
        FRAME.place(&mut svg, x(tick), &plain(tick));
    }
    let _ = write!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{x_name}</text>",
        W - FRAME.right,
        FRAME.height - 4.0
    );
    FRAME.end(svg, lines, x, y)
}

/// A round number without digits that say nothing.
fn plain(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.01 || size == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}
