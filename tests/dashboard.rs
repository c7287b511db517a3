//! A router's metrics page has what dashboards ask for: that of `.packaging/grafana.json` (families, their kind, labels and the
//! values of fixed labels), and those made for vllm-router.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::Client;
use common::process::{RouterProcess, corelane};
use serde_json::Value;

/// Labels that Prometheus adds.
const OF_SCRAPES: [&str; 2] = ["instance", "job"];

fn dashboard() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/.packaging/grafana.json");
    let text = std::fs::read_to_string(path).unwrap();
    serde_json::from_str(&text).expect("it is JSON")
}

fn panels(dashboard: &Value) -> Vec<&Value> {
    dashboard["panels"].as_array().unwrap().iter().collect()
}

/// Each query of a panel, with the panel's title and what the legend shows.
fn queries(dashboard: &Value) -> Vec<(String, String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let of = |panel: &Value| {
        let targets = panel["targets"].as_array().cloned().unwrap_or_default();
        let title = text(&panel["title"]);
        let of = move |t: &Value| (title.clone(), text(&t["expr"]), text(&t["legendFormat"]));
        targets.iter().map(of).collect::<Vec<_>>()
    };
    panels(dashboard).into_iter().flat_map(of).collect()
}

/// The labels of one series.
type Labels = BTreeMap<String, String>;

/// What a metrics page has: the labels of each series by the name of its samples, and the kinds of families.
#[derive(Default)]
struct Page {
    series: BTreeMap<String, Vec<Labels>>,
    kinds: BTreeMap<String, String>,
}

impl Page {
    async fn add(&mut self, args: &[&str]) {
        let ports = ["--port", "0", "--prometheus-port", "0", "--cores", "1"];
        let router = RouterProcess::start(corelane(&[&ports, args].concat()));
        let mut client = Client::open(router.metrics).await;
        let request = b"GET /metrics HTTP/1.1\r\nHost: r\r\n\r\n";
        client.send(request).await;
        let page = client.answer(false).await.expect("the metrics page").body;
        for line in String::from_utf8(page).unwrap().lines() {
            self.read(line);
        }
    }

    fn read(&mut self, line: &str) {
        if let Some(family) = line.strip_prefix("# TYPE ") {
            let (name, kind) = family.split_once(' ').unwrap();
            let samples: &[&str] = match kind {
                "histogram" => &["_bucket", "_sum", "_count"],
                _ => &[""],
            };
            for suffix in samples {
                let name = format!("{name}{suffix}");
                self.kinds.insert(name.clone(), kind.to_owned());
                self.series.entry(name).or_default();
            }
        } else if !line.starts_with('#') {
            let (series, _) = line.rsplit_once(' ').unwrap();
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let pairs = labels.trim_end_matches('}').split("\",");
            let pairs = pairs.filter_map(|pair| pair.split_once("=\""));
            let labels = pairs.map(|(k, v)| (k.to_owned(), v.trim_end_matches('"').to_owned()));
            let of_family = self.series.get_mut(name).expect("a family with a kind");
            of_family.push(labels.collect());
        }
    }
}

/// Every family that a router can have: some are there for disaggregation or `kv_aware` alone.
async fn whole_page() -> Page {
    let mut page = Page::default();
    page.add(&[
        "--worker-urls",
        "http://127.0.0.1:9",
        "--policy",
        "kv_aware",
        "--kv-event-source",
        "http://127.0.0.1:9=tcp://127.0.0.1:9",
    ])
    .await;
    page.add(&[
        "--vllm-pd-disaggregation",
        "--prefill",
        "http://127.0.0.1:9",
        "--decode",
        "http://127.0.0.1:10",
        "--policy",
        "kv_aware",
        "--pd-kv-events",
        "http://127.0.0.1:9=tcp://127.0.0.1:9",
        "--kv-aware-session-affinity-ttl-secs",
        "60",
    ])
    .await;
    page
}

/// What vllm-router 0.1.17 records: name (without its `vllm_router_`), kind, labels. Its summaries are histograms here, so that
/// several routers' add up. Not among them: program scheduling and its predictions, and the caches of the gRPC front end, which
/// are not here.
const RECORDED: [(&str, &str, &[&str]); 44] = [
    ("requests_total", "counter", &["route"]),
    ("request_errors_total", "counter", &["route", "error_type"]),
    ("retries_total", "counter", &["route"]),
    ("retry_backoff_duration_seconds", "histogram", &["attempt"]),
    ("retries_exhausted_total", "counter", &["route"]),
    ("cb_state", "gauge", &["worker"]),
    (
        "cb_state_transitions_total",
        "counter",
        &["worker", "from", "to"],
    ),
    ("cb_outcomes_total", "counter", &["worker", "outcome"]),
    ("active_workers", "gauge", &[]),
    ("worker_health", "gauge", &["worker"]),
    ("processed_requests_total", "counter", &["worker"]),
    ("running_requests", "gauge", &["worker"]),
    ("policy_decisions_total", "counter", &["policy", "worker"]),
    (
        "prefix_routing_decisions_total",
        "counter",
        &["policy", "stage", "outcome"],
    ),
    ("load_balancing_events_total", "counter", &[]),
    ("max_load", "gauge", &[]),
    ("min_load", "gauge", &[]),
    (
        "kv_routing_inputs_total",
        "counter",
        &["transport", "result"],
    ),
    ("kv_placement_lookups_total", "counter", &["result"]),
    ("generate_duration_seconds", "histogram", &[]),
    ("embeddings_total", "counter", &[]),
    ("embeddings_duration_seconds", "histogram", &[]),
    ("embeddings_errors_total", "counter", &["error_type"]),
    ("embeddings_queue_size", "gauge", &[]),
    ("pd_requests_total", "counter", &["route"]),
    ("pd_request_duration_seconds", "histogram", &["route"]),
    ("pd_prefill_requests_total", "counter", &["worker"]),
    ("pd_decode_requests_total", "counter", &["worker"]),
    ("pd_prefill_errors_total", "counter", &["worker"]),
    ("pd_decode_errors_total", "counter", &["worker"]),
    ("pd_errors_total", "counter", &["error_type"]),
    ("pd_body_over_limit_total", "counter", &["stage"]),
    ("pd_prefill_decisions_total", "counter", &["fallback"]),
    ("pd_new_prefill_tokens", "histogram", &[]),
    ("pd_credited_prefix_tokens_total", "counter", &[]),
    (
        "pd_affinity_decisions_total",
        "counter",
        &["stage", "outcome"],
    ),
    ("pd_prefill_occupancy", "gauge", &["worker", "rank"]),
    ("pd_active_prefill_tokens", "gauge", &["worker", "rank"]),
    ("pd_unknown_prefill_requests", "gauge", &["worker", "rank"]),
    ("pd_pending_decode_requests", "gauge", &["worker", "rank"]),
    ("pd_active_decode_requests", "gauge", &["worker", "rank"]),
    ("pd_decode_pending_seconds", "histogram", &[]),
    ("pd_kv_prepare_seconds", "histogram", &[]),
    ("pd_identity_verified", "gauge", &["worker"]),
];

#[tokio::test(flavor = "multi_thread")]
async fn every_series_that_vllm_router_records_is_there() {
    let page = whole_page().await;
    for (name, kind, labels) in RECORDED {
        let sample = match kind {
            "histogram" => format!("vllm_router_{name}_sum"),
            _ => format!("vllm_router_{name}"),
        };
        assert_eq!(
            page.kinds.get(&sample).map(String::as_str),
            Some(kind),
            "{sample}"
        );
        let wanted: BTreeSet<&str> = labels.iter().copied().collect();
        // Those of what has not happened yet have no sample.
        for series in &page.series[&sample] {
            let has: BTreeSet<&str> = series.keys().map(String::as_str).collect();
            assert_eq!(has, wanted, "{sample}");
        }
    }
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Names of series in an expression, each with the matchers behind it.
fn selectors(expression: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for prefix in ["vllm_router_", "corelane_"] {
        for (at, _) in expression.match_indices(prefix) {
            let rest = &expression[at..];
            let end = rest.find(|c| !is_of_name(c)).unwrap_or(rest.len());
            let matchers = rest[end..].strip_prefix('{');
            let matchers = matchers.and_then(|m| m.split_once('}')).map_or("", |m| m.0);
            found.push((rest[..end].to_owned(), matchers.to_owned()));
        }
    }
    found
}

/// Labels in `by (...)`.
fn grouped_by(expression: &str) -> BTreeSet<&str> {
    let groups = expression.split(" by (").skip(1);
    let inner = groups.map(|rest| rest.split_once(')').expect("a closed group").0);
    inner.flat_map(|labels| labels.split(", ")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_query_asks_for_series_and_labels_that_the_router_has() {
    let page = whole_page().await;
    let dashboard = dashboard();
    let queries = queries(&dashboard);
    assert!(queries.len() > 80, "{}", queries.len());
    for (title, expression, legend) in queries {
        let at = format!("panel '{title}': {expression}");
        let selectors = selectors(&expression);
        assert!(!selectors.is_empty(), "{at}: names no metric");
        let groups = grouped_by(&expression);
        for (name, matchers) in selectors {
            let series = page.series.get(&name);
            let series = series.unwrap_or_else(|| panic!("{at}: no series {name}"));
            let has = |label: &str| {
                let is_there = |labels: &Labels| labels.contains_key(label);
                OF_SCRAPES.contains(&label) || series.iter().any(is_there)
            };
            let is_rated = ["rate(", "increase("]
                .iter()
                .any(|f| expression.contains(&format!("{f}{name}{{")));
            assert_eq!(is_rated, page.kinds[&name] != "gauge", "{at}: {name}");
            for label in &groups {
                assert!(has(label), "{at}: {name} has no label {label}");
            }
            for matcher in matchers.split(',') {
                let (label, value) = matcher.split_once('=').unwrap();
                assert!(has(label), "{at}: {name} has no label {label}");
                let value = value.trim_matches(['~', '"']);
                for wanted in value.split('|').filter(|value| !value.starts_with('$')) {
                    let is_it = |l: &Labels| l.get(label).is_some_and(|l| l == wanted);
                    assert!(series.iter().any(is_it), "{at}: {label} is never {wanted}");
                }
            }
        }
        for shown in legend.split("{{").skip(1) {
            let label = shown.split_once("}}").unwrap().0;
            assert!(groups.contains(label), "{at}: the legend shows {label}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn variables_are_filled_from_what_the_router_has() {
    let page = whole_page().await;
    let dashboard = dashboard();
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let names: Vec<&str> = variables
        .iter()
        .map(|v| v["name"].as_str().unwrap())
        .collect();
    for variable in variables.iter().filter(|v| v["type"] == "query") {
        let query = variable["query"]["query"].as_str().unwrap();
        let (name, _) = selectors(query).remove(0);
        let label = query.trim_end_matches(')').rsplit_once(", ").unwrap().1;
        let is_there = |labels: &Labels| labels.contains_key(label);
        let is_known = OF_SCRAPES.contains(&label) || page.series[&name].iter().any(is_there);
        assert!(is_known, "{query}");
    }
    for (title, expression, _) in queries(&dashboard) {
        for rest in expression
            .split('$')
            .skip(1)
            .filter(|r| !r.starts_with("__"))
        {
            let name = &rest[..rest.find(|c| !is_of_name(c)).unwrap()];
            assert!(names.contains(&name), "panel '{title}': no variable {name}");
        }
    }
}

#[test]
fn panels_have_ids_and_places_of_their_own() {
    let dashboard = dashboard();
    let (mut ids, mut taken) = (BTreeSet::new(), BTreeMap::new());
    let mut rows = Vec::new();
    for panel in panels(&dashboard) {
        let title = panel["title"].as_str().expect("a title");
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "id of '{title}'");
        let of = |side: &str| panel["gridPos"][side].as_u64().unwrap();
        assert!(of("x") + of("w") <= 24, "'{title}' is out of the grid");
        for x in of("x")..of("x") + of("w") {
            for y in of("y")..of("y") + of("h") {
                let other = taken.insert((x, y), title);
                assert_eq!(other, None, "'{title}' lies on another panel");
            }
        }
        if panel["type"] == "row" {
            rows.push(title);
            continue;
        }
        assert!(
            panel["description"]
                .as_str()
                .is_some_and(|text| text.ends_with('.')),
            "'{title}'"
        );
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "'{title}'");
        let targets = panel["targets"].as_array().unwrap();
        let letters: BTreeSet<_> = targets
            .iter()
            .map(|t| t["refId"].as_str().unwrap())
            .collect();
        assert_eq!(letters.len(), targets.len(), "queries of '{title}'");
    }
    assert!(rows.len() >= 9, "{rows:?}");
}
