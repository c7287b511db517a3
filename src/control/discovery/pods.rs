//! What is read of a pod. No more of it is kept than this: a list may hold thousands.

use std::net::{IpAddr, SocketAddr};

use kube::core::{ApiResource, NotUsed, Object};
use serde::{Deserialize, Serialize};

use super::claims::Found;
use crate::config::{WorkerSpec, WorkerUrl};
use crate::route::Role;

/// The annotation with a prefill worker's bootstrap port (vllm-router's name).
const BOOTSTRAP_PORT: &str = "vllm.ai/bootstrap-port";

/// A pod as the API sends it.
pub(super) type RawPod = Object<NotUsed, RawStatus>;

/// Of its status.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct RawStatus {
    phase: String,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    conditions: Vec<RawCondition>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct RawCondition {
    r#type: String,
    status: String,
}

/// Pods, as the API calls them.
pub(super) fn resource() -> ApiResource {
    ApiResource {
        group: String::new(),
        version: "v1".to_owned(),
        api_version: "v1".to_owned(),
        kind: "Pod".to_owned(),
        plural: "pods".to_owned(),
    }
}

/// One pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pod {
    /// Differs from that of a pod of the same name that was there before.
    pub(super) uid: String,
    /// `namespace/name`.
    pub(super) name: String,
    /// Where it takes requests; none: it has no address yet, has ended, or is to end.
    address: Option<IpAddr>,
    /// Whether it says that it may get requests.
    is_ready: bool,
    bootstrap_port: Option<u16>,
}

impl Pod {
    /// Reads what counts.
    pub(super) fn new(raw: RawPod) -> Pod {
        let meta = raw.metadata;
        let status = raw.status.unwrap_or_default();
        let name = format!(
            "{}/{}",
            meta.namespace.unwrap_or_default(),
            meta.name.unwrap_or_default()
        );
        let mut conditions = status.conditions.iter();
        let is_ready = conditions.any(|c| c.r#type == "Ready" && c.status == "True");
        let is_alive = status.phase == "Running" && meta.deletion_timestamp.is_none();
        let address = status.pod_ip.and_then(|ip| ip.parse().ok());
        let annotations = meta.annotations.unwrap_or_default();
        let bootstrap_port = annotations.get(BOOTSTRAP_PORT).and_then(|text| {
            let port = text.trim().parse().ok().filter(|port| *port != 0);
            if port.is_none() {
                tracing::warn!(
                    pod = name,
                    "annotation {BOOTSTRAP_PORT} is not a port: left alone"
                );
            }
            port
        });
        Pod {
            uid: meta.uid.unwrap_or_default(),
            name,
            address: address.filter(|_| is_alive),
            is_ready,
            bootstrap_port,
        }
    }

    /// The worker in it; none: it is none now.
    pub(super) fn found(&self, role: Role, port: u16) -> Option<Found> {
        let at = SocketAddr::new(self.address?, port);
        let url = WorkerUrl::parse(&format!("http://{at}")).ok()?;
        Some(Found {
            id: self.uid.clone(),
            spec: WorkerSpec {
                url,
                role,
                bootstrap_port: self.bootstrap_port.filter(|_| role == Role::Prefill),
            },
            is_ready: self.is_ready,
        })
    }
}
