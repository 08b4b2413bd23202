//! A diagram of time against peers as an SVG, from the JSON lines of cold-start.
//!
//! Both axes are logarithmic. A linear time has slope one, a quadratic time slope two.

use std::fmt::Write;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::parts::report::Report;

/// A curve of the diagram.
struct Curve {
    /// The key of its figure in the JSON of cold-start.
    key: &'static str,
    /// Its class in the style sheet.
    class: &'static str,
    label: &'static str,
}

const CURVES: [Curve; 3] = [
    Curve {
        key: "classic_floor_seconds",
        class: "classic",
        label: "a gateway per route (raw writer)",
    },
    Curve { key: "seconds", class: "ours", label: "flannel in Rust" },
    Curve { key: "floor_seconds", class: "floor", label: "floor: nexthop objects (raw writer)" },
];

/// The width and the height of the diagram.
const SIZE: (f64, f64) = (720.0, 440.0);
const LEFT: f64 = 70.0;
const RIGHT: f64 = 470.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 380.0;

/// Draws the figures of `family` from standard input to `out`.
pub(crate) fn run(family: &'static str, out: &Path) -> anyhow::Result<Report> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let rows: Result<Vec<Value>, _> =
        text.lines().filter(|line| !line.is_empty()).map(serde_json::from_str).collect();
    let mut rows = rows
        .context("standard input: one JSON object per line is expected, from cold-start --json")?;
    rows.retain(|row| row["bench"] == "cold-start" && row["family"] == family);
    rows.sort_by_key(|row| row["peers"].as_u64());
    ensure!(
        rows.len() > 1,
        "standard input has {} figures of cold-start of {family}, two are needed",
        rows.len()
    );
    std::fs::write(out, Diagram::new(&rows, family).svg()?)
        .with_context(|| format!("{}", out.display()))?;
    Ok(Report { family: Some(family), ..Report::default() })
}

/// A point of a curve.
struct Point {
    peers: f64,
    seconds: f64,
}

/// The points of a curve, from the rows that have its figure.
fn points(rows: &[Value], key: &str) -> Vec<Point> {
    let point =
        |row: &Value| Some(Point { peers: row["peers"].as_f64()?, seconds: row[key].as_f64()? });
    rows.iter().filter_map(point).collect()
}

/// A logarithmic axis: the decades that contain all values, and their positions.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn new(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Self {
        let low = values.clone().fold(f64::INFINITY, f64::min).log10().floor();
        let high = values.fold(0.0, f64::max).log10().ceil();
        Self { low, high: high.max(low + 1.0), from, to }
    }

    fn place(&self, value: f64) -> f64 {
        self.from + (value.log10() - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    fn decades(&self) -> impl Iterator<Item = f64> {
        (self.low as i32..=self.high as i32).map(|power| 10f64.powi(power))
    }
}

/// The diagram of some rows of figures.
struct Diagram<'a> {
    rows: &'a [Value],
    family: &'a str,
    x: Axis,
    y: Axis,
}

impl<'a> Diagram<'a> {
    fn new(rows: &'a [Value], family: &'a str) -> Self {
        let all: Vec<Point> = CURVES.iter().flat_map(|curve| points(rows, curve.key)).collect();
        let x = Axis::new(all.iter().map(|point| point.peers), LEFT, RIGHT);
        let y = Axis::new(all.iter().map(|point| point.seconds), BOTTOM, TOP);
        Self { rows, family, x, y }
    }

    fn svg(&self) -> Result<String, std::fmt::Error> {
        let mut svg = head(self.family);
        self.draw_grid(&mut svg)?;
        self.draw_curves(&mut svg)?;
        svg.push_str("</svg>\n");
        Ok(svg)
    }

    /// Draws a line with its number for each decade.
    fn draw_grid(&self, svg: &mut String) -> std::fmt::Result {
        for peers in self.x.decades() {
            let at = self.x.place(peers);
            write!(
                svg,
                r#"<line class="grid" x1="{at:.1}" y1="{TOP}" x2="{at:.1}" y2="{BOTTOM}"/>"#
            )?;
            writeln!(
                svg,
                r#"<text class="soft" x="{at:.1}" y="{}" text-anchor="middle">{}</text>"#,
                BOTTOM + 20.0,
                thousands(peers)
            )?;
        }
        for seconds in self.y.decades() {
            let at = self.y.place(seconds);
            write!(
                svg,
                r#"<line class="grid" x1="{LEFT}" y1="{at:.1}" x2="{RIGHT}" y2="{at:.1}"/>"#
            )?;
            writeln!(
                svg,
                r#"<text class="soft" x="{}" y="{:.1}" text-anchor="end">{seconds} s</text>"#,
                LEFT - 8.0,
                at + 4.0
            )?;
        }
        writeln!(
            svg,
            r#"<text class="soft" x="{}" y="{}" text-anchor="middle">peers</text>"#,
            (LEFT + RIGHT) / 2.0,
            BOTTOM + 42.0
        )?;
        Ok(())
    }

    /// Draws the curves with their labels.
    fn draw_curves(&self, svg: &mut String) -> std::fmt::Result {
        let mut last_label = f64::NEG_INFINITY;
        for Curve { key, class, label } in CURVES {
            let points = points(self.rows, key);
            let Some(last) = points.last() else { continue };
            let places: Vec<String> = points
                .iter()
                .map(|point| {
                    format!("{:.1},{:.1}", self.x.place(point.peers), self.y.place(point.seconds))
                })
                .collect();
            // From the top down, so that labels do not overlap.
            last_label = (self.y.place(last.seconds) + 4.0).max(last_label + 34.0);
            writeln!(svg, r#"<g class="{class}"><polyline points="{}"/>"#, places.join(" "))?;
            for point in &points {
                let cx = self.x.place(point.peers);
                let cy = self.y.place(point.seconds);
                let peers = thousands(point.peers);
                let seconds = point.seconds;
                write!(svg, r#"<circle cx="{cx:.1}" cy="{cy:.1}" r="3.5">"#)?;
                writeln!(svg, "<title>{peers} peers: {seconds:.3} s</title></circle>")?;
            }
            let at = RIGHT + 12.0;
            write!(svg, r#"<text class="label" x="{at}" y="{last_label:.1}">{label}</text>"#)?;
            writeln!(
                svg,
                r#"<text class="label" x="{at}" y="{:.1}">{} peers: {:.2} s</text></g>"#,
                last_label + 15.0,
                thousands(last.peers),
                last.seconds
            )?;
        }
        Ok(())
    }
}

/// The beginning of the file, up to the title of the diagram.
fn head(family: &str) -> String {
    let (width, height) = SIZE;
    format!(
        concat!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" "##,
            r##"width="{width}" height="{height}" role="img" aria-labelledby="title">"##,
            "\n",
            r##"<title id="title">Seconds until all routes of so many vxlan peers "##,
            "({family}) are in the kernel</title>\n",
            "<style>\n",
            "svg {{ font: 13px system-ui, sans-serif; --ink: #1f2328; --soft: #656d76; ",
            "--grid: #d8dee4; --ours: #0a69da; --floor: #1a7f37; --classic: #bc4c00; ",
            "--ground: #ffffff; }}\n",
            "@media (prefers-color-scheme: dark) {{ svg {{ --ink: #e6edf3; --soft: #9198a1; ",
            "--grid: #30363d; --ours: #58a6ff; --floor: #3fb950; --classic: #f0883e; ",
            "--ground: #0d1117; }} }}\n",
            ".ground {{ fill: var(--ground); }} .ink {{ fill: var(--ink); }} ",
            ".soft {{ fill: var(--soft); }} .grid {{ stroke: var(--grid); }}\n",
            ".ours {{ --c: var(--ours); }} .floor {{ --c: var(--floor); }} ",
            ".classic {{ --c: var(--classic); }}\n",
            "polyline {{ fill: none; stroke: var(--c); stroke-width: 2; }} ",
            ".floor polyline {{ stroke-dasharray: 5 4; }} circle, .label {{ fill: var(--c); }}\n",
            "</style>\n",
            r##"<rect class="ground" width="{width}" height="{height}"/>"##,
            "\n",
            r##"<text class="ink" x="{left}" y="26" font-weight="600">"##,
            "Lease set to kernel: seconds against vxlan peers ({family})</text>\n",
        ),
        width = width,
        height = height,
        family = family,
        left = LEFT,
    )
}

/// A number with commas, such as 65,000.
fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().filter_map(|g| std::str::from_utf8(g).ok()).collect();
    groups.join(",")
}
