//! One page that needs nothing but itself: percentile plots as inline SVG, and the tables.

use std::fmt::Write as _;

use hdrhistogram::Histogram;

use super::report::{Report, TIMES};
use crate::plot::{Frame, Line, escape};

const COLOURS: [&str; 2] = ["#0b6e99", "#d9480f"];
const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1080px;padding:0 1em;color:#212529}\
h1{font-size:1.5em}svg{width:100%;height:auto}figure{margin:1em 0}figcaption{color:#495057}pre{background:#f8f9fa;padding:1em;\
overflow-x:auto;font-size:.85em}text{font:11px system-ui,sans-serif;fill:#495057}";

const FRAME: Frame = Frame {
    width: 1000.0,
    height: 280.0,
    left: 62.0,
    right: 14.0,
    top: 12.0,
    bottom: 36.0,
};

/// The page.
pub fn html(report: &Report) -> String {
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>corelane bench</title><style>{STYLE}</style>\
         <h1>corelane bench</h1><p><code>{}</code></p>",
        escape(&report.command)
    );
    for (name, of) in TIMES {
        let lines: Vec<Line> = report
            .parts
            .iter()
            .zip(COLOURS)
            .filter(|(part, _)| !of(&part.tally).is_empty())
            .map(|(part, colour)| Line {
                name: format!("{} {}", part.name, part.url),
                colour,
                points: points(of(&part.tally)),
            })
            .collect();
        if !lines.is_empty() {
            page.push_str(&plot(name, &lines));
        }
    }
    let _ = write!(page, "<pre>{}</pre>", escape(&report.text()));
    page
}

/// Quantiles up to the one beyond which a single value is left: nines of the percentile (1 is p90), and ms.
fn points(times: &Histogram<u64>) -> Vec<(f64, f64)> {
    let end = (times.len() as f64).log10().max(0.3);
    let steps = 160;
    let point = |step: i32| {
        let nines = end * f64::from(step) / f64::from(steps);
        (
            nines,
            times.value_at_quantile(1.0 - 10f64.powf(-nines)) as f64 / 1e6,
        )
    };
    (0..=steps).map(point).collect()
}

fn plot(caption: &str, lines: &[Line]) -> String {
    let all = || lines.iter().flat_map(|line| &line.points);
    let x_max = all().map(|point| point.0).fold(1.0, f64::max);
    // Both axes by powers of ten: it is the rare and long ones that are looked for.
    let low = all()
        .map(|point| point.1)
        .fold(f64::MAX, f64::min)
        .max(1e-4)
        .log10()
        .floor();
    let high = all()
        .map(|point| point.1)
        .fold(1e-4, f64::max)
        .log10()
        .ceil()
        .max(low + 1.0);
    let x = |nines: f64| FRAME.left + nines / x_max * FRAME.inner_width();
    let y = |ms: f64| {
        let share = (ms.max(1e-6).log10().clamp(low, high) - low) / (high - low);
        FRAME.height - FRAME.bottom - share * FRAME.inner_height()
    };
    let mut svg = FRAME.begin(caption);
    for power in low as i32..=high as i32 {
        let ms = 10f64.powi(power);
        FRAME.level(&mut svg, y(ms), &format!("{ms} ms"));
    }
    for (name, nines) in [
        ("p50", 0.301),
        ("p90", 1.0),
        ("p99", 2.0),
        ("p99.9", 3.0),
        ("p99.99", 4.0),
        ("p99.999", 5.0),
    ] {
        if nines <= x_max {
            let at = x(nines);
            let _ = write!(
                svg,
                "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{}\" y2=\"{}\" stroke=\"#e9ecef\"/>",
                FRAME.top,
                FRAME.height - FRAME.bottom,
            );
            FRAME.place(&mut svg, at, name);
        }
    }
    FRAME.end(svg, lines, x, y)
}

#[cfg(test)]
mod tests {
    use super::super::report::Part;
    use super::super::tally::Tally;
    use super::*;

    #[test]
    fn the_page_has_a_curve_for_each_target_and_asks_nobody_for_anything() {
        let tally = || {
            let mut tally = Tally::default();
            (1..5000u64).for_each(|us| tally.total.record(us * 1000).unwrap());
            tally
        };
        let part = |name| Part {
            name,
            url: "http://a/<b>".into(),
            tally: tally(),
        };
        let report = Report {
            command: "x".into(),
            machine: "m".into(),
            commit: None,
            parts: vec![part("A"), part("B")],
            ratios: vec![],
        };
        let page = html(&report);
        assert_eq!(page.matches("<polyline").count(), 2);
        assert!(page.contains(">p99.9<") && page.contains("http://a/&lt;b&gt;"));
        for asks in ["<script", "<link", "src=", "href=", "@import", "url("] {
            assert!(!page.contains(asks), "{asks}");
        }
        let curve = points(&tally().total);
        assert!(curve.windows(2).all(|pair| pair[0].1 <= pair[1].1));
        let at_p99 = curve.iter().find(|point| point.0 >= 2.0).unwrap().1;
        assert!((at_p99 / 4.95 - 1.0).abs() < 0.02, "{at_p99}");
    }
}
