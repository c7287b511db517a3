//! TLS for clients and to workers: what the files say, and one connection's session. Nothing of sockets in here; a core
//! puts a [`Session`] between a socket's bytes and the exchange, so that plain and TLS go the same way from there on.
//!
//! rustls does the work (TLS 1.2 and 1.3, ring). HTTP/1.1 only, said by ALPN. Files are PEM. A certificate that has been
//! renewed holds for connections made after it was read again; standing ones keep theirs.
//!
//! Not lock-free: a handshake looks into tables that all cores share (tickets, sessions to resume). No request on a
//! standing connection does.

mod session;
mod trust;

use std::path::Path;
use std::sync::{Arc, OnceLock};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

pub use session::{Broken, Session};

/// What both sides say they speak (RFC 7301).
const ALPN: &[u8] = b"http/1.1";

/// A file's content and the flag that named it, for messages.
#[derive(Clone, Copy)]
pub struct Pem<'a> {
    /// Long name, without dashes.
    pub flag: &'static str,
    /// Where it was read from.
    pub path: &'a Path,
    /// The file.
    pub bytes: &'a [u8],
}

/// Which file cannot be used, and why. Nothing of a key is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable {
    /// Long name, without dashes.
    pub flag: &'static str,
    /// In words.
    pub reason: String,
}

impl Pem<'_> {
    fn refuse(&self, reason: impl std::fmt::Display) -> Unusable {
        Unusable {
            flag: self.flag,
            reason: format!("{}: {reason}", self.path.display()),
        }
    }

    fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, Unusable> {
        let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(self.bytes).collect();
        let all = all.map_err(|e| self.refuse(e))?;
        if all.is_empty() {
            return Err(self.refuse("holds no certificate in PEM form"));
        }
        Ok(all)
    }

    fn key(&self) -> Result<PrivateKeyDer<'static>, Unusable> {
        PrivateKeyDer::from_pem_slice(self.bytes)
            .map_err(|_| self.refuse("holds no private key in PEM form (without a password)"))
    }

    fn roots(&self) -> Result<RootCertStore, Unusable> {
        let mut roots = RootCertStore::empty();
        for certificate in self.certificates()? {
            roots.add(certificate).map_err(|e| self.refuse(e))?;
        }
        Ok(roots)
    }
}

fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    let make = || Arc::new(rustls::crypto::ring::default_provider());
    PROVIDER.get_or_init(make).clone()
}

/// A certificate chain, the leaf first, with its key.
fn certified(chain: Pem<'_>, key: Pem<'_>) -> Result<Arc<SingleCertAndKey>, Unusable> {
    let certificates = chain.certificates()?;
    let certified = CertifiedKey::from_der(certificates, key.key()?, &provider());
    match certified {
        Ok(certified) => Ok(Arc::new(SingleCertAndKey::from(certified))),
        Err(rustls::Error::InconsistentKeys(_)) => Err(key.refuse(format_args!(
            "is not the key of the certificate in {}",
            chain.path.display()
        ))),
        Err(e) => Err(key.refuse(e)),
    }
}

/// TLS as clients see it. `client_ca`: who must have signed a client's certificate; none: clients need none.
///
/// # Errors
/// A file holds nothing of use, or the key is another certificate's.
pub fn for_clients(
    chain: Pem<'_>,
    key: Pem<'_>,
    client_ca: Option<Pem<'_>>,
) -> Result<Arc<ServerConfig>, Unusable> {
    let certified = certified(chain, key)?;
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|e| chain.refuse(e))?;
    let builder = match client_ca {
        Some(ca) => {
            let roots = Arc::new(ca.roots()?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
            builder.with_client_cert_verifier(verifier.build().map_err(|e| ca.refuse(e))?)
        }
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_cert_resolver(certified);
    config.alpn_protocols = vec![ALPN.to_vec()];
    // A client that comes back brings what is needed to go on, whichever core it meets.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.ticketer = rustls::crypto::ring::Ticketer::new().map_err(|e| chain.refuse(e))?;
    Ok(Arc::new(config))
}

/// TLS to workers. `ca`: who must have signed a worker's certificate, or that certificate itself; none: whom this machine
/// trusts. `identity`: our own certificate and key, for workers that ask.
///
/// # Errors
/// A file holds nothing of use, or the key is another certificate's.
pub fn to_workers(
    ca: Option<Pem<'_>>,
    identity: Option<(Pem<'_>, Pem<'_>)>,
) -> Result<Arc<ClientConfig>, Unusable> {
    let broken = |e: rustls::Error| Unusable {
        flag: "tls-ca",
        reason: e.to_string(),
    };
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(broken)?;
    let verifier = match ca {
        Some(ca) => trust::Verifier::new(ca.roots()?, ca.certificates()?),
        None => trust::Verifier::new(system_roots().clone(), Vec::new()),
    };
    let verifier = Arc::new(verifier.map_err(|e| Unusable {
        flag: "tls-ca",
        reason: format!("without it workers' certificates need the system's authorities: {e}"),
    })?);
    // "Dangerous" is what rustls calls every verifier but its own; this one asks that one first.
    let builder = builder
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match identity {
        Some((chain, key)) => builder.with_client_cert_resolver(certified(chain, key)?),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(config))
}

/// TLS to workers where nothing was said of it. Made once: all that use it share its sessions.
///
/// # Errors
/// This machine trusts nobody.
pub fn to_workers_by_default() -> Result<Arc<ClientConfig>, Unusable> {
    static MADE: OnceLock<Result<Arc<ClientConfig>, Unusable>> = OnceLock::new();
    MADE.get_or_init(|| to_workers(None, None)).clone()
}

/// Whom this machine trusts; read once.
fn system_roots() -> &'static RootCertStore {
    static ROOTS: OnceLock<RootCertStore> = OnceLock::new();
    ROOTS.get_or_init(|| {
        let found = rustls_native_certs::load_native_certs();
        for error in &found.errors {
            tracing::warn!(%error, "a file of trusted certificates cannot be read");
        }
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(found.certs);
        roots
    })
}

/// Why TLS to a worker came to nothing, for operators: what to look at.
pub fn explain(error: &rustls::Error) -> &'static str {
    use rustls::{AlertDescription as Alert, CertificateError as Certificate, Error};
    match error {
        Error::InvalidCertificate(certificate) => match certificate {
            // A bad signature: it names an authority that has another key now.
            Certificate::UnknownIssuer | Certificate::BadSignature => {
                "TLS: its certificate is not signed by anybody who is trusted (--tls-ca)"
            }
            Certificate::Expired | Certificate::ExpiredContext { .. } => {
                "TLS: its certificate has expired"
            }
            Certificate::NotValidYet | Certificate::NotValidYetContext { .. } => {
                "TLS: its certificate is not valid yet"
            }
            Certificate::NotValidForName | Certificate::NotValidForNameContext { .. } => {
                "TLS: its certificate is for another name"
            }
            // What WebPKI says of a certificate that is its own authority (see `trust`).
            Certificate::Other(_) => {
                "TLS: its certificate is not accepted; one that signs itself must stand in --tls-ca"
            }
            _ => "TLS: its certificate is not accepted",
        },
        Error::AlertReceived(
            Alert::CertificateRequired
            | Alert::BadCertificate
            | Alert::UnknownCA
            | Alert::CertificateUnknown
            | Alert::CertificateExpired
            | Alert::AccessDenied,
        ) => "TLS: it does not accept our certificate, or wants one (--tls-worker-cert)",
        Error::AlertReceived(_) => "TLS: it refused",
        Error::InvalidMessage(_) => "TLS: it does not speak TLS",
        _ => "TLS failed",
    }
}

/// How a worker is spoken to by TLS.
#[derive(Clone, Debug)]
pub struct ToWorker {
    /// The name (sent as SNI, RFC 6066) or address that its certificate must be for.
    pub name: ServerName<'static>,
    /// With what.
    pub config: Arc<ClientConfig>,
}

impl ToWorker {
    /// A session that begins a connection to it.
    ///
    /// # Errors
    /// rustls cannot begin one.
    pub fn session(&self) -> Result<Session, Broken> {
        Session::to_worker(self.config.clone(), self.name.clone())
    }
}
