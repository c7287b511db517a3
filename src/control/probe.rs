//! Small requests to workers from the control thread: probes, model lists, cache resets. Each on a connection of its
//! own, each under one time limit, with a bounded body.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::health::Failure;
use crate::config::{Config, WorkerUrl};
use crate::tls::{self, ToWorker};

/// Largest body of an answer that is read.
const BODY_BYTES_MAX: usize = 4 << 20;

/// An answer, and where it came from.
#[derive(Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// The address that was connected to.
    pub address: SocketAddr,
    /// The whole body.
    pub body: Bytes,
}

/// Whom to ask: a worker, and which of its host's addresses to try first, if it still is one of them. A name with
/// several addresses thus stays with the one that was chosen.
#[derive(Clone, Debug)]
pub struct Target {
    /// The worker.
    pub url: WorkerUrl,
    /// Where it was found last.
    pub address: Option<SocketAddr>,
}

/// Asks a worker for its health: the address that answered.
pub async fn health(config: &Config, target: &Target) -> Result<SocketAddr, Failure> {
    let answer = request(
        config,
        target,
        Method::GET,
        &config.health.endpoint,
        config.health.timeout,
    )
    .await?;
    match answer.status {
        200..300 => Ok(answer.address),
        status => Err(Failure::Status(status)),
    }
}

/// Sends a request without a body.
pub async fn request(
    config: &Config,
    target: &Target,
    method: Method,
    path: &str,
    timeout: Duration,
) -> Result<Answer, Failure> {
    let exchange = exchange(config, target, method, path);
    tokio::time::timeout(timeout, exchange)
        .await
        .unwrap_or(Err(Failure::Timeout))
}

async fn exchange(
    config: &Config,
    target: &Target,
    method: Method,
    path: &str,
) -> Result<Answer, Failure> {
    let url = &target.url;
    let (stream, address) = connect(target).await?;
    let (mut sender, _connection) = match url.server_name() {
        Some(name) => {
            let tls = config.tls.to_worker(name.clone());
            let ToWorker { name, config } =
                tls.map_err(|_| Failure::Tls("nobody is trusted: --tls-ca is needed"))?;
            let connector = tokio_rustls::TlsConnector::from(config);
            let stream = connector.connect(name, stream).await;
            speak(stream.map_err(|error| failure_of_io(&error))?).await?
        }
        None => speak(stream).await?,
    };
    let mut request = Request::builder()
        .method(method)
        .uri(format!("{}{path}", url.path_prefix()))
        .header(header::HOST, &**url.authority())
        .header(
            header::USER_AGENT,
            concat!("corelane/", env!("CARGO_PKG_VERSION")),
        )
        .header(header::CONNECTION, "close");
    if let Some(key) = &config.api_key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {}", key.expose()));
    }
    let request = request
        .body(Empty::<Bytes>::new())
        .map_err(|_| Failure::Malformed)?;
    let response = sender
        .send_request(request)
        .await
        .map_err(|error| failure_of(&error))?;
    let status = response.status().as_u16();
    let body = Limited::new(response.into_body(), BODY_BYTES_MAX)
        .collect()
        .await
        .map_err(|error| {
            error
                .downcast_ref::<hyper::Error>()
                .map_or(Failure::Malformed, failure_of)
        })?;
    Ok(Answer {
        status,
        address,
        body: body.to_bytes(),
    })
}

/// Begins HTTP on a connection.
async fn speak(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Result<(SendRequest<Empty<Bytes>>, AbortOnDrop), Failure> {
    let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| failure_of(&error))?;
    let connection = tokio::spawn(async move {
        // Its errors reach the request, too.
        let _ = connection.await;
    });
    Ok((sender, AbortOnDrop(connection)))
}

/// The connection's task must not outlive a request that was given up.
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn connect(target: &Target) -> Result<(TcpStream, SocketAddr), Failure> {
    let mut failure = Failure::Unresolved;
    let mut addresses = resolve(&target.url).await?;
    addresses.sort_by_key(|address| Some(*address) != target.address);
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok((stream, address)),
            Err(error) => failure = failure_of_io(&error),
        }
    }
    Err(failure)
}

async fn resolve(url: &WorkerUrl) -> Result<Vec<SocketAddr>, Failure> {
    if let Ok(ip) = url.host().parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, url.port())]);
    }
    let addresses = tokio::net::lookup_host((url.host(), url.port()))
        .await
        .map_err(|_| Failure::Unresolved)?;
    Ok(addresses.collect())
}

fn failure_of(error: &hyper::Error) -> Failure {
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(io) = inner.downcast_ref::<std::io::Error>() {
            return failure_of_io(io);
        }
        source = inner.source();
    }
    if error.is_incomplete_message() || error.is_closed() || error.is_canceled() {
        return Failure::Reset;
    }
    Failure::Malformed
}

fn failure_of_io(error: &std::io::Error) -> Failure {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    if let Some(error) = inner {
        return Failure::Tls(tls::explain(error));
    }
    match error.kind() {
        ErrorKind::ConnectionRefused => Failure::Refused,
        ErrorKind::TimedOut => Failure::Timeout,
        ErrorKind::ConnectionReset
        | ErrorKind::ConnectionAborted
        | ErrorKind::BrokenPipe
        | ErrorKind::NotConnected
        | ErrorKind::UnexpectedEof => Failure::Reset,
        _ => Failure::Unreachable,
    }
}
