use super::super::{Cli, Config, RecordKind};
use super::*;
use clap::Parser;

fn parse(line: &str) -> Result<Config, String> {
    let line = format!("corelane --cores 1 {line}");
    let cli = Cli::try_parse_from(line.split(' ')).map_err(|e| e.to_string())?;
    Config::from_cli(cli).map_err(|e| e.to_string())
}

#[test]
fn selectors_are_what_the_api_takes() {
    let line = "--service-discovery --selector app=vllm tier=gpu --service-discovery-port 8000 \
                --service-discovery-namespace llm";
    let kubernetes = parse(line).unwrap().discovery.kubernetes.unwrap();
    assert_eq!(kubernetes.port, 8000);
    assert_eq!(kubernetes.namespace.as_deref(), Some("llm"));
    let text = "app=vllm,tier=gpu".to_owned();
    assert_eq!(kubernetes.selectors, [(Role::Regular, text)]);
    let pd = "--vllm-pd-disaggregation --service-discovery --decode-selector role=d \
              --prefill-selector example.com/role=p a=";
    let kubernetes = parse(pd).unwrap().discovery.kubernetes.unwrap();
    assert_eq!((kubernetes.port, kubernetes.namespace), (80, None));
    assert_eq!(
        kubernetes.selectors,
        [
            (Role::Prefill, "example.com/role=p,a=".to_owned()),
            (Role::Decode, "role=d".to_owned())
        ]
    );
}

#[test]
fn a_selector_that_nothing_uses_is_told_and_not_refused() {
    let idle = |line: &str| parse(line).unwrap().discovery.idle_flags;
    assert_eq!(idle("--selector a=b"), ["selector"]);
    let regular = "--service-discovery --selector a=b --prefill-selector c=d";
    assert_eq!(idle(regular), ["prefill-selector"]);
    assert!(idle("--service-discovery --selector a=b").is_empty());
}

#[test]
fn what_cannot_be_is_refused_with_its_flag() {
    let table = [
        ("--service-discovery", "needs --selector"),
        (
            "--vllm-pd-disaggregation --service-discovery --selector a=b",
            "needs --prefill-selector",
        ),
        ("--service-discovery --selector app", "'--selector'"),
        ("--selector =v", "'--selector'"),
        ("--selector a=(b)", "'--selector'"),
        (
            "--service-discovery --selector a=b --service-discovery-namespace a/b",
            "'--service-discovery-namespace'",
        ),
        ("--service-discovery-port 0", "--service-discovery-port"),
        ("--workers-file /nonexistent/file", "'--workers-file'"),
        ("--dns-server nonsense", "--dns-server"),
        ("--worker-urls dns+http://10.0.0.1:1", "needs no look-up"),
        ("--worker-urls dns+ftp://a", "must be http"),
        ("--worker-urls dnssrv+http://a:1", "leave it out"),
        ("--worker-urls dns+http://a:1 dns+http://a:1", "twice"),
    ];
    for (line, wanted) in table {
        let error = parse(line).expect_err(line);
        assert!(error.contains(wanted), "{line}: {error}");
    }
}

#[test]
fn names_of_dns_stand_among_the_workers() {
    let config = parse(
        "--vllm-pd-disaggregation --prefill dns+http://p.svc:8000/x 9000 --prefill http://p:1 \
         --decode dnssrv+https://_vllm._tcp.d.svc",
    )
    .unwrap();
    assert_eq!(config.workers.len(), 1);
    let names = &config.discovery.dns.names;
    let shown: Vec<_> = names
        .iter()
        .map(|n| (n.to_string(), n.kind, n.role, n.bootstrap_port))
        .collect();
    assert_eq!(
        shown,
        [
            (
                "dns+http://p.svc:8000/x".to_owned(),
                RecordKind::Address,
                Role::Prefill,
                Some(9000)
            ),
            (
                "dnssrv+https://_vllm._tcp.d.svc".to_owned(),
                RecordKind::Service,
                Role::Decode,
                None
            ),
        ]
    );
}

#[test]
fn one_static_worker_is_enough_for_power_of_two_where_others_are_found() {
    assert!(parse("--policy power_of_two --worker-urls http://a:1").is_err());
    let line = "--policy power_of_two --worker-urls http://a:1 --service-discovery --selector a=b";
    assert!(parse(line).is_ok());
}
