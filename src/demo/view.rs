//! What the demo shows: two samples of everything become one set of figures, and these a screen or a line.
//!
//! Runs on the caller's thread. The figures and both renderings are pure; the terminal is touched by [`Screen`] only, which
//! gives it back on every way out (its drop, and ratatui's panic hook).

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row, Table, Wrap};
use ratatui::{DefaultTerminal, Frame};

use super::load::LoadTotals;
use super::{FleetView, HandoverCounts, Role, SimStats};

/// Rows below the boxes: router, its latency, fleet, load, the load's last error.
const BOTTOM_ROWS: u16 = 5;

/// Everything at one moment.
#[derive(Clone, Debug)]
pub struct Sample {
    /// When.
    pub at: Instant,
    /// As the router says.
    pub fleet: FleetView,
    /// As the engines say.
    pub engines: Vec<SimStats>,
    /// As the load says, if there is one.
    pub load: Option<LoadTotals>,
}

/// What does not change while the demo runs.
#[derive(Clone, Debug)]
pub struct Banner {
    /// Where the router is.
    pub router: SocketAddr,
    /// The model to ask for.
    pub model: String,
}

impl Banner {
    /// The line to try.
    pub fn curl(&self) -> String {
        format!(
            "curl -N http://{}/v1/chat/completions -H 'content-type: application/json' -d '{{\"model\":\"{}\",\
             \"stream\":true,\"messages\":[{{\"role\":\"user\",\"content\":\"Hello\"}}]}}'",
            self.router, self.model
        )
    }
}

/// One row of the table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerFigures {
    /// Its URL.
    pub url: String,
    /// Its state, as the router says.
    pub state: &'static str,
    /// Requests chosen for it and not ended.
    pub in_flight: u32,
    /// Of these, without a first byte.
    pub waiting: u32,
    /// Fraction of its prompt tokens that its cache held.
    pub hit_rate: f64,
    /// The same as the router expected it, in bytes.
    pub expected_hit_rate: f64,
    /// KV blocks in use, as a fraction.
    pub usage: f64,
    /// Tokens generated a second.
    pub tokens_per_s: f64,
    /// Times chosen, since the start.
    pub requests: u64,
    /// What it does for others.
    pub role: Role,
    /// Its part in P/D, since the start.
    pub handovers: HandoverCounts,
}

/// The load's part.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadFigures {
    /// Turns answered a second.
    pub turns_per_s: f64,
    /// Time to the first token, recent, in milliseconds.
    pub first_token_p50_ms: f64,
    /// The same, 99th percentile.
    pub first_token_p99_ms: f64,
    /// Turns since the start.
    pub turns: u64,
    /// Errors since the start.
    pub errors: u64,
    /// The last of them.
    pub last_error: Option<String>,
}

/// What is shown: rates over the time between two samples, totals as of the later one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// In the router's order.
    pub workers: Vec<WorkerFigures>,
    /// Decisions a second and since the start, by reason; only reasons that have occurred.
    pub decisions: Vec<(&'static str, f64, u64)>,
    /// Requests ended, since the start.
    pub requests: u64,
    /// Requests ended a second.
    pub requests_per_s: f64,
    /// Answers being relayed.
    pub open_streams: u64,
    /// Fraction of all prompt tokens that was cached where they were to be computed, over the time between the samples.
    pub hit_rate: f64,
    /// Of a fleet of prefill and decode workers, since the start.
    pub handovers: Option<HandoverCounts>,
    /// The router's own added time, in microseconds.
    pub added_us: (f64, f64),
    /// With a load.
    pub load: Option<LoadFigures>,
}

impl Figures {
    /// Compares two samples, the earlier one first.
    pub fn between(earlier: &Sample, later: &Sample) -> Figures {
        let seconds = later.at.duration_since(earlier.at).as_secs_f64().max(1e-3);
        let rate = |before: u64, now: u64| now.saturating_sub(before) as f64 / seconds;
        let decisions_before = |reason: &str| {
            let found = earlier
                .fleet
                .decisions
                .iter()
                .find(|(name, _)| *name == reason);
            found.map_or(0, |(_, count)| *count)
        };
        let decisions = later.fleet.decisions.iter().filter(|(_, count)| *count > 0);
        let (before, now) = (
            prompt_tokens(&earlier.engines),
            prompt_tokens(&later.engines),
        );
        Figures {
            workers: worker_figures(earlier, later, seconds),
            decisions: decisions
                .map(|(reason, count)| (*reason, rate(decisions_before(reason), *count), *count))
                .collect(),
            requests: later.fleet.requests_total,
            requests_per_s: rate(earlier.fleet.requests_total, later.fleet.requests_total),
            open_streams: later.fleet.open_streams,
            hit_rate: fraction(
                now.0.saturating_sub(before.0),
                now.1.saturating_sub(before.1),
            ),
            handovers: handovers(&later.engines),
            added_us: (later.fleet.added_p50_us, later.fleet.added_p99_us),
            load: later
                .load
                .as_ref()
                .map(|load| load_figures(earlier.load.as_ref(), load, seconds)),
        }
    }
}

/// Prompt tokens found in caches, and all, of the engines that compute prompts: a decode worker does not.
pub fn prompt_tokens(engines: &[SimStats]) -> (u64, u64) {
    let computing = engines.iter().filter(|e| e.role != Role::Decode);
    computing.fold((0, 0), |(cached, all), engine| {
        (cached + engine.cached_tokens, all + engine.prompt_tokens)
    })
}

/// The fleet's hand-overs, if it is one of prefill and decode workers.
pub fn handovers(engines: &[SimStats]) -> Option<HandoverCounts> {
    let is_pd = engines.iter().any(|engine| engine.role != Role::Regular);
    is_pd.then(|| {
        let mut sum = HandoverCounts::default();
        engines.iter().for_each(|e| sum.add(&e.handovers));
        sum
    })
}

fn worker_figures(earlier: &Sample, later: &Sample, seconds: f64) -> Vec<WorkerFigures> {
    let rows = later.fleet.workers.iter().map(|worker| {
        let of = |sample: &Sample| -> SimStats {
            sample
                .engines
                .iter()
                .find(|engine| engine.url == worker.url)
                .cloned()
                .unwrap_or_default()
        };
        let (before, now) = (of(earlier), of(later));
        WorkerFigures {
            url: worker.url.clone(),
            state: worker.state,
            in_flight: worker.in_flight,
            waiting: worker.waiting,
            hit_rate: fraction(now.cached_tokens, now.prompt_tokens),
            expected_hit_rate: fraction(worker.matched_bytes, worker.prompt_bytes),
            usage: now.usage,
            tokens_per_s: now.output_tokens.saturating_sub(before.output_tokens) as f64 / seconds,
            requests: worker.requests,
            role: now.role,
            handovers: now.handovers,
        }
    });
    rows.collect()
}

fn load_figures(earlier: Option<&LoadTotals>, later: &LoadTotals, seconds: f64) -> LoadFigures {
    let none = LoadTotals::default();
    let earlier = earlier.unwrap_or(&none);
    let recent = later.first_token.since(&earlier.first_token);
    LoadFigures {
        turns_per_s: (later.turns - earlier.turns) as f64 / seconds,
        first_token_p50_ms: recent.quantile_ms(0.5),
        first_token_p99_ms: recent.quantile_ms(0.99),
        turns: later.turns,
        errors: later.errors,
        last_error: later.last_error.clone(),
    }
}

/// `part` of `whole`, 0 of nothing.
pub fn fraction(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

/// The figures on one line, for where there is no terminal.
pub fn plain_line(elapsed: Duration, figures: &Figures) -> String {
    let in_flight: u32 = figures.workers.iter().map(|worker| worker.in_flight).sum();
    let tokens: f64 = figures
        .workers
        .iter()
        .map(|worker| worker.tokens_per_s)
        .sum();
    let ready = figures
        .workers
        .iter()
        .filter(|worker| worker.state == "ready")
        .count();
    let mut line = format!(
        "{:4} s  {ready}/{} ready  {:.1} req/s  {in_flight} in flight  hit {:.1} %  {tokens:.0} tok/s  added p50 {:.0} us p99 {:.0} us",
        elapsed.as_secs(),
        figures.workers.len(),
        figures.requests_per_s,
        figures.hit_rate * 100.0,
        figures.added_us.0,
        figures.added_us.1,
    );
    if let Some(load) = &figures.load {
        line += &format!(
            "  TTFT p50 {:.0} ms p99 {:.0} ms  errors {}",
            load.first_token_p50_ms, load.first_token_p99_ms, load.errors
        );
    }
    if let Some(handovers) = &figures.handovers {
        line += &format!("  hand-overs {}", handovers_text(handovers));
    }
    for (reason, per_second, _) in &figures.decisions {
        line += &format!("  {reason} {per_second:.1}/s");
    }
    line
}

/// What became of a fleet's hand-overs, and which violations there were.
pub fn handovers_text(counts: &HandoverCounts) -> String {
    let mut text = format!(
        "{} issued, {} fetched, {} open, {} expired, {} violations",
        counts.issued,
        counts.fetched,
        counts.open(),
        counts.expired,
        counts.violations_total()
    );
    if counts.lost > 0 {
        text += &format!(", {} lost", counts.lost);
    }
    for (nth, (kind, count)) in counts.violations_by_kind().enumerate() {
        text += if nth == 0 { ": " } else { ", " };
        text += &format!("{kind} {count}");
    }
    text
}

/// Draws the full screen.
pub fn draw(frame: &mut Frame, banner: &Banner, elapsed: Duration, figures: &Figures) {
    let area = frame.area();
    let curl = format!("try: {}", banner.curl());
    // Wrapped at blanks, a text may need one row more than its length says.
    let curl_rows = curl.len().div_ceil(usize::from(area.width.max(1))) as u16 + 1;
    let decision_rows = figures.decisions.len().max(1) as u16 + 2;
    let bottom_rows = BOTTOM_ROWS + u16::from(figures.handovers.is_some());
    let others = 1 + curl_rows + decision_rows + bottom_rows;
    let table_rows = area
        .height
        .saturating_sub(others)
        .min(figures.workers.len() as u16 + 3);
    let [head, try_it, table, decisions, rest] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(curl_rows),
        Constraint::Length(table_rows.max(4)),
        Constraint::Length(decision_rows),
        Constraint::Min(bottom_rows),
    ])
    .areas(area);
    frame.render_widget(head_line(banner, elapsed), head);
    frame.render_widget(
        Paragraph::new(curl).dim().wrap(Wrap { trim: false }),
        try_it,
    );
    frame.render_widget(worker_table(figures, table.width, table.height), table);
    frame.render_widget(decision_list(&figures.decisions), decisions);
    frame.render_widget(bottom(figures), rest);
}

fn head_line(banner: &Banner, elapsed: Duration) -> Line<'static> {
    let seconds = elapsed.as_secs();
    Line::from(vec![
        " corelane demo ".bold().reversed(),
        format!("  http://{}", banner.router).bold(),
        format!("  {:02}:{:02}", seconds / 60, seconds % 60).into(),
        "   q, Esc or Ctrl-C ends it".dim(),
    ])
}

/// Columns of the table: name, width in cells, and where it is shown: narrow, wide, narrow with P/D, wide with P/D.
const COLUMNS: [(&str, u16, [bool; 4]); 13] = [
    ("worker", 15, [true; 4]),
    ("role", 7, [false, false, true, true]),
    ("state", 9, [true; 4]),
    ("in flight", 9, [true; 4]),
    ("waiting", 7, [true, true, false, true]),
    ("hit rate", 8, [true; 4]),
    ("expected", 8, [true, true, false, true]),
    ("KV used", 7, [false, true, false, true]),
    ("tok/s", 6, [true, true, false, true]),
    ("requests", 8, [true; 4]),
    ("handed", 7, [false, false, false, true]),
    ("expired", 7, [false, false, false, true]),
    ("violations", 10, [false, false, true, true]),
];
/// Columns of text, from the first one on; the others are numbers.
const TEXT_COLUMNS: usize = 3;
/// All columns without P/D, the blanks between them and the border.
const WIDE: u16 = 87;
/// The same with P/D.
const PD_WIDE: u16 = 122;

fn worker_table(figures: &Figures, width: u16, height: u16) -> Table<'static> {
    let workers = &figures.workers;
    let is_pd = figures.handovers.is_some();
    let is_wide = width >= if is_pd { PD_WIDE } else { WIDE };
    let layout = usize::from(is_wide) + 2 * usize::from(is_pd);
    let is_shown = |column: usize| COLUMNS[column].2[layout];
    let fitting = usize::from(height.saturating_sub(3));
    let rows = workers.iter().take(fitting).map(|worker| {
        let cells = worker_cells(worker).into_iter().enumerate();
        Row::new(
            cells
                .filter(|(column, _)| is_shown(*column))
                .map(|(_, cell)| cell),
        )
    });
    let columns = || {
        COLUMNS
            .iter()
            .enumerate()
            .filter(|(column, _)| is_shown(*column))
    };
    let widths: Vec<Constraint> = columns()
        .map(|(column, (_, width, _))| match column {
            0 => Constraint::Min(*width),
            _ => Constraint::Length(*width),
        })
        .collect();
    let head = Row::new(columns().map(|(column, (name, _, _))| {
        if column < TEXT_COLUMNS {
            Cell::from(*name)
        } else {
            number((*name).to_owned())
        }
    }));
    let title = match workers.len() {
        all if all > fitting => format!(" workers ({fitting} of {all}) "),
        _ => " workers ".to_owned(),
    };
    Table::new(rows, widths)
        .header(head.style(Style::new().add_modifier(Modifier::DIM)))
        .block(Block::bordered().title(title))
}

fn worker_cells(worker: &WorkerFigures) -> [Cell<'static>; COLUMNS.len()] {
    let color = match worker.state {
        "ready" => Color::Green,
        "draining" => Color::Yellow,
        _ => Color::Red,
    };
    let percent = |part: f64| number(format!("{:.1} %", part * 100.0));
    // What should be 0 stands out when it is not.
    let fault = |count: u64| {
        let cell = number(count.to_string());
        if count == 0 { cell } else { cell.red() }
    };
    let address = worker.url.strip_prefix("http://").unwrap_or(&worker.url);
    let handovers = &worker.handovers;
    [
        Cell::from(address.to_owned()),
        Cell::from(worker.role.label()),
        Cell::from(Span::styled(worker.state, Style::new().fg(color))),
        number(worker.in_flight.to_string()),
        number(worker.waiting.to_string()),
        percent(worker.hit_rate),
        percent(worker.expected_hit_rate),
        percent(worker.usage),
        number(format!("{:.0}", worker.tokens_per_s)),
        number(worker.requests.to_string()),
        number((handovers.issued + handovers.claimed).to_string()),
        fault(handovers.expired),
        fault(handovers.violations_total()),
    ]
}

fn number(text: String) -> Cell<'static> {
    Cell::from(Line::from(text).right_aligned())
}

fn decision_list(decisions: &[(&'static str, f64, u64)]) -> Paragraph<'static> {
    let most = decisions
        .iter()
        .map(|(_, rate, _)| *rate)
        .fold(1.0, f64::max);
    let mut lines: Vec<Line> = decisions
        .iter()
        .map(|(reason, rate, total)| {
            let bar = "▇".repeat((rate / most * 24.0).round() as usize);
            Line::from(vec![
                format!("{reason:24} {rate:8.1}/s {total:10}  ").into(),
                Span::styled(bar, Style::new().fg(Color::Cyan)),
            ])
        })
        .collect();
    if lines.is_empty() {
        lines.push(Line::from("none yet").dim());
    }
    Paragraph::new(lines).block(Block::bordered().title(" decisions "))
}

fn bottom(figures: &Figures) -> Paragraph<'static> {
    let (p50, p99) = figures.added_us;
    let mut lines = vec![
        Line::from(format!(
            "router   {:.1} requests/s   {} requests   {} open streams",
            figures.requests_per_s, figures.requests, figures.open_streams
        )),
        Line::from(format!(
            "         added latency p50 {p50:.0} us, p99 {p99:.0} us"
        )),
        Line::from(format!(
            "fleet    {:.1} % of prompt tokens cached",
            figures.hit_rate * 100.0
        )),
    ];
    if let Some(handovers) = &figures.handovers {
        let line = Line::from(format!("P/D      {}", handovers_text(handovers)));
        let is_good = handovers.violations_total() + handovers.expired == 0;
        lines.push(if is_good { line } else { line.red() });
    }
    match &figures.load {
        None => lines.push(Line::from("load     none; start with --load for one").dim()),
        Some(load) => {
            let errors = format!("   {} errors", load.errors);
            lines.push(Line::from(vec![
                format!(
                    "load     {:.1} turns/s   {} turns   TTFT p50 {:.0} ms, p99 {:.0} ms",
                    load.turns_per_s, load.turns, load.first_token_p50_ms, load.first_token_p99_ms
                )
                .into(),
                if load.errors == 0 {
                    errors.into()
                } else {
                    errors.red()
                },
            ]));
            if let Some(error) = &load.last_error {
                lines.push(Line::from(format!("         last error: {error}")).red());
            }
        }
    }
    Paragraph::new(lines)
}

/// The terminal in full-screen mode. Dropping it gives the terminal back.
pub struct Screen(DefaultTerminal);

impl Screen {
    /// Takes the terminal over.
    ///
    /// # Errors
    /// When there is none.
    pub fn open() -> io::Result<Screen> {
        ratatui::try_init().map(Screen)
    }

    /// Draws the figures.
    ///
    /// # Errors
    /// When the terminal is gone.
    pub fn draw(
        &mut self,
        banner: &Banner,
        elapsed: Duration,
        figures: &Figures,
    ) -> io::Result<()> {
        self.0
            .draw(|frame| draw(frame, banner, elapsed, figures))
            .map(drop)
    }

    /// Waits up to `limit` for a key; says whether it was one that ends the demo.
    ///
    /// # Errors
    /// When the terminal is gone.
    pub fn is_quit_pressed(&mut self, limit: Duration) -> io::Result<bool> {
        if !event::poll(limit)? {
            return Ok(false);
        }
        Ok(
            matches!(event::read()?, Event::Key(key) if key.kind == KeyEventKind::Press && ends(key.code, key.modifiers)),
        )
    }
}

/// In raw mode Ctrl-C is a key like any other, not a signal.
fn ends(code: KeyCode, modifiers: KeyModifiers) -> bool {
    match code {
        KeyCode::Esc | KeyCode::Char('q' | 'Q') => true,
        KeyCode::Char('c') => modifiers.contains(KeyModifiers::CONTROL),
        _ => false,
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::WorkerView;
    use super::*;

    fn sample(at: Instant, step: u64) -> Sample {
        let url = "http://127.0.0.1:9".to_owned();
        let mut load = LoadTotals {
            turns: 10 * step,
            ..LoadTotals::default()
        };
        for _ in 0..load.turns {
            load.first_token.add(Duration::from_millis(80));
        }
        Sample {
            at,
            fleet: FleetView {
                workers: vec![WorkerView {
                    url: url.clone(),
                    state: "ready",
                    in_flight: 3,
                    waiting: 1,
                    requests: 10 * step,
                    prompt_bytes: 1000 * step,
                    matched_bytes: 900 * step,
                }],
                requests_total: 20 * step,
                decisions: vec![("affinity", 8 * step), ("cold", 2 * step), ("never", 0)],
                added_p50_us: 13.0,
                added_p99_us: 60.0,
                open_streams: 2,
            },
            engines: vec![SimStats {
                url,
                prompt_tokens: 100 * step,
                cached_tokens: 80 * step,
                output_tokens: 500 * step,
                usage: 0.5,
                ..SimStats::default()
            }],
            load: Some(load),
        }
    }

    fn figures() -> Figures {
        let start = Instant::now();
        Figures::between(
            &sample(start, 1),
            &sample(start + Duration::from_secs(2), 3),
        )
    }

    #[test]
    fn rates_are_over_the_time_between_and_totals_of_the_later_one() {
        let figures = figures();
        let worker = &figures.workers[0];
        assert_eq!((worker.tokens_per_s, worker.requests), (500.0, 30));
        assert_eq!((worker.hit_rate, worker.expected_hit_rate), (0.8, 0.9));
        assert_eq!(figures.decisions, [("affinity", 8.0, 24), ("cold", 2.0, 6)]);
        assert_eq!((figures.requests_per_s, figures.requests), (20.0, 60));
        let load = figures.load.unwrap();
        assert_eq!((load.turns_per_s, load.turns), (10.0, 30));
        assert!((load.first_token_p50_ms - 80.0).abs() < 6.0);
    }

    fn screen(width: u16, height: u16, figures: &Figures) -> String {
        let banner = Banner {
            router: ([127, 0, 0, 1], 30000).into(),
            model: "demo".into(),
        };
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal
            .draw(|frame| draw(frame, &banner, Duration::from_secs(75), figures))
            .unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn the_screen_holds_every_figure_on_a_usual_terminal() {
        for (width, height) in [(80, 24), (120, 40)] {
            let text = screen(width, height, &figures());
            for part in [
                "http://127.0.0.1:30000",
                "01:15",
                "try: curl",
                "127.0.0.1:9 ",
                "ready",
                "80.0 %",
                "90.0 %",
                "affinity",
                "8.0/s",
                "p50 13 us, p99 60 us",
                "10.0 turns/s",
                "0 errors",
            ] {
                assert!(text.contains(part), "{width} x {height}: {part} in\n{text}");
            }
            assert_eq!(text.contains("KV used"), width >= WIDE);
        }
    }

    #[test]
    fn the_screen_survives_any_size_and_says_what_it_leaves_out() {
        let mut many = figures();
        many.workers = vec![many.workers[0].clone(); 256];
        for (width, height) in [(1, 1), (20, 3), (40, 10), (300, 5)] {
            screen(width, height, &many);
        }
        let text = screen(100, 30, &many);
        assert!(text.contains(" of 256) "), "{text}");
        assert!(
            text.contains("10.0 turns/s"),
            "the rows below keep their place:\n{text}"
        );
    }

    #[test]
    fn the_plain_line_holds_what_matters() {
        let line = plain_line(Duration::from_secs(7), &figures());
        for part in [
            "7 s",
            "1/1 ready",
            "20.0 req/s",
            "hit 80.0 %",
            "errors 0",
            "affinity 8.0/s",
        ] {
            assert!(line.contains(part), "{part} in {line}");
        }
        assert!(!line.contains('\n'));
    }

    /// A prefill worker and a decode worker that found something wrong.
    fn pd_figures() -> Figures {
        let mut later = sample(Instant::now(), 3);
        let mut earlier = sample(later.at - Duration::from_secs(2), 1);
        for sample in [&mut earlier, &mut later] {
            sample.engines[0].role = Role::Prefill;
            sample.engines[0].handovers.issued = 40;
            sample.engines[0].handovers.fetched = 38;
            sample.engines[0].handovers.expired = 1;
            let url = "http://127.0.0.1:8".to_owned();
            let mut decode = SimStats {
                url: url.clone(),
                role: Role::Decode,
                ..SimStats::default()
            };
            decode.prompt_tokens = 1000 * u64::from(sample.load.as_ref().unwrap().turns > 10);
            decode.handovers.violations[super::super::Violation::Reused as usize] = 2;
            sample.engines.push(decode);
            sample.fleet.workers.push(WorkerView {
                url,
                state: "ready",
                ..WorkerView::default()
            });
        }
        Figures::between(&earlier, &later)
    }

    #[test]
    fn a_disaggregated_fleet_shows_roles_and_what_became_of_its_handovers() {
        let figures = pd_figures();
        assert_eq!(figures.hit_rate, 0.8, "decode workers compute no prompts");
        let said = "40 issued, 38 fetched, 1 open, 1 expired, 2 violations: reused 2";
        for (width, height) in [(80, 24), (PD_WIDE, 40)] {
            let text = screen(width, height, &figures);
            for part in [
                "127.0.0.1:9 ",
                "prefill",
                "decode",
                "violations",
                said,
                "0 errors",
            ] {
                assert!(text.contains(part), "{width} x {height}: {part} in\n{text}");
            }
            assert_eq!(text.contains("handed"), width >= PD_WIDE);
        }
        let line = plain_line(Duration::from_secs(7), &figures);
        assert!(line.contains(&format!("hand-overs {said}")), "{line}");
        let plain = screen(120, 40, &self::figures());
        assert!(!plain.contains("P/D") && !plain.contains("violations"));
    }

    #[test]
    fn the_right_keys_end_it() {
        assert!(
            ends(KeyCode::Esc, KeyModifiers::NONE) && ends(KeyCode::Char('q'), KeyModifiers::NONE)
        );
        assert!(ends(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(
            !ends(KeyCode::Char('c'), KeyModifiers::NONE)
                && !ends(KeyCode::Enter, KeyModifiers::NONE)
        );
    }
}
