//! The admin port's listener: TLS where clients have it, plain HTTP else, as the configuration of the moment says.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::Listener;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::either::Either;

use super::Plane;

/// Time for a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Handshakes at a time; who comes on top of them waits to be accepted.
const HANDSHAKE_COUNT_MAX: usize = 256;

type Stream = Either<TcpStream, Box<TlsStream<TcpStream>>>;

pub(super) struct SecureListener {
    listener: TcpListener,
    plane: Arc<Plane>,
    /// Handshakes that are done, and for those that are being done.
    done: mpsc::Receiver<(Stream, SocketAddr)>,
    report: mpsc::Sender<(Stream, SocketAddr)>,
    room: Arc<Semaphore>,
}

impl SecureListener {
    pub(super) fn new(listener: TcpListener, plane: Arc<Plane>) -> SecureListener {
        let (report, done) = mpsc::channel(HANDSHAKE_COUNT_MAX);
        SecureListener {
            listener,
            plane,
            done,
            report,
            room: Arc::new(Semaphore::new(HANDSHAKE_COUNT_MAX)),
        }
    }
}

impl Listener for SecureListener {
    type Io = Stream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Stream, SocketAddr) {
        loop {
            let room = self.room.clone();
            let (permit, (stream, address)) = tokio::select! {
                Some(done) = self.done.recv() => return done,
                accepted = async {
                    // Closed it is never.
                    let permit = room.acquire_owned().await.ok();
                    (permit, Listener::accept(&mut self.listener).await)
                } => accepted,
            };
            let Some(tls) = self.plane.shared.config().tls.for_clients.clone() else {
                return (Either::Left(stream), address);
            };
            let report = self.report.clone();
            tokio::spawn(async move {
                let handshake = TlsAcceptor::from(tls).accept(stream);
                if let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await {
                    let _ = report
                        .send((Either::Right(Box::new(stream)), address))
                        .await;
                }
                drop(permit);
            });
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}
