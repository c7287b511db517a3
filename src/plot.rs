//! Plots as inline SVG, for pages that load nothing: what those of the simulator and of the load generator have in common.

use std::fmt::Write as _;

/// A curve with its name.
pub struct Line {
    /// As the legend has it.
    pub name: String,
    /// In CSS.
    pub colour: &'static str,
    /// From left to right, in the plot's own units.
    pub points: Vec<(f64, f64)>,
}

/// A plot's size and margins, in units of its view box.
#[allow(missing_docs, reason = "each is the side it names")]
pub struct Frame {
    pub width: f64,
    pub height: f64,
    pub left: f64,
    pub right: f64,
    pub top: f64,
    pub bottom: f64,
}

impl Frame {
    /// Width of what is inside the margins.
    pub fn inner_width(&self) -> f64 {
        self.width - self.left - self.right
    }

    /// The same of the height.
    pub fn inner_height(&self) -> f64 {
        self.height - self.top - self.bottom
    }

    /// A plot begins.
    pub fn begin(&self, caption: &str) -> String {
        format!(
            "<figure><figcaption>{}</figcaption><svg viewBox=\"0 0 {} {}\">",
            escape(caption),
            self.width,
            self.height
        )
    }

    /// A line across, with what stands for its height at its left end.
    pub fn level(&self, svg: &mut String, at: f64, label: &str) {
        let _ = write!(
            svg,
            "<line x1=\"{}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#e9ecef\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            self.left,
            self.width - self.right,
            self.left - 5.0,
            at + 4.0,
        );
    }

    /// What stands for a place, below it.
    pub fn place(&self, svg: &mut String, at: f64, label: &str) {
        let below = self.height - self.bottom + 14.0;
        let _ = write!(
            svg,
            "<text x=\"{at:.1}\" y=\"{below}\" text-anchor=\"middle\">{label}</text>"
        );
    }

    /// The curves, by where their points lie in the view box; and the legend. The plot ends.
    pub fn end(
        &self,
        mut svg: String,
        lines: &[Line],
        x: impl Fn(f64) -> f64,
        y: impl Fn(f64) -> f64,
    ) -> String {
        for line in lines {
            let points = line.points.iter();
            let points: Vec<String> = points
                .map(|point| format!("{:.1},{:.1}", x(point.0), y(point.1)))
                .collect();
            let _ = write!(
                svg,
                "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\" points=\"{}\"/>",
                line.colour,
                points.join(" "),
            );
        }
        svg.push_str("</svg><figcaption>");
        for line in lines {
            let _ = write!(
                svg,
                "<span style=\"color:{}\">\u{25a0}</span> {} &nbsp; ",
                line.colour,
                escape(&line.name)
            );
        }
        svg + "</figcaption></figure>"
    }
}

/// Text as it stands between tags.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
