//! Certificates, clients that speak TLS, and TLS in front of a mock worker.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair,
    generate_simple_self_signed,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream};

use super::{Client, File, Worker};

/// A certificate and its key, as files.
pub struct Issued {
    pub cert: File,
    pub key: File,
}

impl Issued {
    fn chain(&self) -> Vec<CertificateDer<'static>> {
        let all = CertificateDer::pem_file_iter(self.cert.path()).unwrap();
        all.map(Result::unwrap).collect()
    }

    fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::from_pem_file(self.key.path()).unwrap()
    }

    /// A certificate that signs itself, as `openssl req -x509` makes it: its own authority.
    pub fn by_itself(name: &str) -> Issued {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let cert = params.self_signed(&key).unwrap();
        Issued {
            cert: File::new(&cert.pem()),
            key: File::new(&key.serialize_pem()),
        }
    }

    /// One that nobody has reason to trust.
    pub fn by_nobody(name: &str) -> Issued {
        let made = generate_simple_self_signed([name.to_owned()]).unwrap();
        Issued {
            cert: File::new(&made.cert.pem()),
            key: File::new(&made.signing_key.serialize_pem()),
        }
    }
}

/// Who signs certificates.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    pub file: File,
}

impl Authority {
    pub fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let file = File::new(&issuer.pem());
        Authority { issuer, file }
    }

    /// A certificate for a name or address.
    pub fn issue(&self, name: &str) -> Issued {
        let (cert, key) = self.pem(name);
        Issued {
            cert: File::new(&cert),
            key: File::new(&key),
        }
    }

    /// The same as text.
    pub fn pem(&self, name: &str) -> (String, String) {
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        (cert.pem(), key.serialize_pem())
    }

    fn roots(&self) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).unwrap();
        Arc::new(roots)
    }

    /// What a client says that trusts this authority.
    pub fn client(&self, identity: Option<&Issued>) -> Arc<ClientConfig> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(self.roots());
        let config = match identity {
            Some(issued) => builder.with_client_auth_cert(issued.chain(), issued.key()),
            None => Ok(builder.with_no_client_auth()),
        };
        Arc::new(config.unwrap())
    }

    /// Connects and shakes hands.
    pub async fn connect(&self, to: SocketAddr) -> Client<TlsStream<TcpStream>> {
        connect(self.client(None), to).await.unwrap()
    }
}

/// Connects and shakes hands, as one who asks for `127.0.0.1`.
pub async fn connect(
    config: Arc<ClientConfig>,
    to: SocketAddr,
) -> std::io::Result<Client<TlsStream<TcpStream>>> {
    let tcp = TcpStream::connect(to).await?;
    tcp.set_nodelay(true)?;
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let stream = TlsConnector::from(config).connect(name, tcp).await?;
    Ok(Client {
        stream,
        buffer: Vec::new(),
    })
}

/// TLS in front of a worker that speaks plain HTTP.
pub struct Front {
    pub address: SocketAddr,
    pub state: Arc<FrontState>,
    task: JoinHandle<()>,
}

#[derive(Default)]
pub struct FrontState {
    pub handshakes: AtomicU64,
    /// The names that were asked for.
    pub names: Mutex<Vec<Option<String>>>,
}

impl Front {
    /// `client_ca`: whose certificates a router must have.
    pub async fn start(worker: &Worker, issued: &Issued, client_ca: Option<&Authority>) -> Front {
        Front::before(worker.address, issued, client_ca).await
    }

    pub async fn before(to: SocketAddr, issued: &Issued, client_ca: Option<&Authority>) -> Front {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap();
        let builder = match client_ca {
            Some(ca) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(ca.roots(), provider);
                builder.with_client_cert_verifier(verifier.build().unwrap())
            }
            None => builder.with_no_client_auth(),
        };
        let config = builder
            .with_single_cert(issued.chain(), issued.key())
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(FrontState::default());
        let seen = state.clone();
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let Ok((tcp, _)) = listener.accept().await else {
                    continue;
                };
                let _ = tcp.set_nodelay(true);
                let (acceptor, seen) = (acceptor.clone(), seen.clone());
                connections.spawn(async move {
                    let Ok(mut stream) = acceptor.accept(tcp).await else {
                        return;
                    };
                    let name = stream.get_ref().1.server_name().map(str::to_owned);
                    seen.names.lock().unwrap().push(name);
                    seen.handshakes.fetch_add(1, Ordering::Relaxed);
                    let mut worker = TcpStream::connect(to).await.unwrap();
                    let _ = worker.set_nodelay(true);
                    // Its end is told by close_notify only where the worker's was a clean one.
                    if copy_bidirectional(&mut stream, &mut worker).await.is_ok() {
                        let _ = stream.shutdown().await;
                    }
                });
            }
        });
        Front {
            address,
            state,
            task,
        }
    }

    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    pub fn handshakes(&self) -> u64 {
        self.state.handshakes.load(Ordering::Relaxed)
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}
