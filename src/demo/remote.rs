//! Claiming a hand-over from a simulated worker of another process: one HTTP request to the worker the parameters name.
//!
//! What NIXL's handshake and transfer are to vLLM, in its simplest form. Runs inside the handler that asks; whatever goes
//! wrong on the way means that there is no such engine.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::Request;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::handover::Violation;

/// Where a worker answers such claims.
pub const CLAIM_PATH: &str = "/mock/claim";
/// A worker that has not answered by then is taken for dead.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Longest answer read, in bytes.
const ANSWER_BYTES_MAX: usize = 4096;

/// Claims a hand-over where its parameters say it is. There it counts as fetched at once.
///
/// # Errors
/// What the other worker finds wrong, or [`Violation::UnknownEngine`] where none answers.
pub async fn claim(params: &Value, prompt_hash: u64) -> Result<(), Violation> {
    let address = address(params).ok_or(Violation::UnknownEngine)?;
    let body = json!({"params": params, "prompt_hash": prompt_hash}).to_string();
    let verdict = tokio::time::timeout(TIMEOUT, ask(address, body)).await;
    match verdict {
        Ok(Some(Value::Null)) => Ok(()),
        Ok(Some(kind)) => {
            let kind = kind.as_str().and_then(Violation::from_label);
            Err(kind.unwrap_or(Violation::UnknownEngine))
        }
        _ => Err(Violation::UnknownEngine),
    }
}

/// The answer to a claim: what is wrong with it, or `null`.
pub fn verdict(result: Result<(), Violation>) -> Value {
    json!({"violation": result.err().map(Violation::label)})
}

fn address(params: &Value) -> Option<SocketAddr> {
    let host: IpAddr = params["remote_host"].as_str()?.parse().ok()?;
    let port = u16::try_from(params["remote_port"].as_u64()?).ok()?;
    Some(SocketAddr::new(host, port))
}

async fn ask(address: SocketAddr, body: String) -> Option<Value> {
    let stream = TcpStream::connect(address).await.ok()?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.ok()?;
    // Its errors reach the sender as well.
    tokio::spawn(connection);
    let request = Request::post(CLAIM_PATH)
        .header("host", address.to_string())
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))
        .ok()?;
    let answer = sender.send_request(request).await.ok()?;
    if !answer.status().is_success() {
        return None;
    }
    let bytes = Limited::new(answer.into_body(), ANSWER_BYTES_MAX);
    let bytes = bytes.collect().await.ok()?.to_bytes();
    let value: Value = serde_json::from_slice(&bytes).ok()?;
    value.get("violation").cloned()
}
