//! How many data-parallel ranks an engine has, read off its `/metrics` as vllm-router does: vLLM labels its series with
//! `engine="0"`, `engine="1"`, ...

/// Most ranks that are believed.
const RANK_COUNT_MAX: usize = 1024;

/// Distinct `engine` labels of a page in Prometheus' text format. None: no such label, or more than can be.
pub fn count(page: &[u8]) -> Option<u32> {
    let page = std::str::from_utf8(page).ok()?;
    let mut ranks: Vec<u32> = page
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(engine)
        .collect();
    ranks.sort_unstable();
    ranks.dedup();
    match ranks.len() {
        0 => None,
        count if count > RANK_COUNT_MAX => None,
        count => u32::try_from(count).ok(),
    }
}

/// The `engine` label of one sample. A label that only ends so (`my_engine`) is another one.
fn engine(line: &str) -> Option<u32> {
    let labels = &line[line.find('{')? + 1..];
    let (at, name) = labels
        .match_indices("engine=\"")
        .find(|(at, _)| *at == 0 || matches!(labels.as_bytes()[at - 1], b',' | b' '))?;
    let value = &labels[at + name.len()..];
    value[..value.find('"')?].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distinct_engines_are_counted() {
        let page = r#"# HELP vllm:num_requests_running engine="9"
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_running{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting{model_name="m",engine="1"} 0.0
vllm:cache{my_engine="5",model_name="m"} 0.0
vllm:odd{engine="all"} 0.0
python_gc_objects_collected_total{generation="0"} 1
"#;
        assert_eq!(count(page.as_bytes()), Some(2));
        for junk in ["", "x 1", "x{engine=\"", "x{engine=\"a\"} 1", "x{} 1"] {
            assert_eq!(count(junk.as_bytes()), None, "{junk}");
        }
        assert_eq!(count(b"\xff"), None);
    }
}
