//! Where certificates and their keys come from, and what TLS is now.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::files::{self, Stamp};
use super::{ConfigError, TlsArgs};
use crate::tls::{self, Pem};

/// Largest file of certificates that is read.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// A file that was named, and what it was when it was read.
#[derive(Clone, Debug)]
struct File {
    flag: &'static str,
    path: PathBuf,
    stamp: Option<Stamp>,
}

impl File {
    fn read(&mut self) -> Result<Vec<u8>, ConfigError> {
        let (bytes, stamp) =
            files::read(&self.path, FILE_BYTES_MAX).map_err(|reason| ConfigError {
                flag: self.flag,
                reason: format!("{}: {reason}", self.path.display()),
            })?;
        self.stamp = Some(stamp);
        Ok(bytes)
    }
}

/// What was said of TLS. Kept beside what came of it, so that the files can be read again without anything else.
#[derive(Clone, Debug, Default)]
pub struct TlsSource {
    cert: Option<File>,
    key: Option<File>,
    client_ca: Option<File>,
    ca: Option<File>,
    worker_cert: Option<File>,
    worker_key: Option<File>,
}

/// TLS as it holds.
#[derive(Clone, Default)]
pub struct Tls {
    /// For clients; none: they speak plain HTTP.
    pub for_clients: Option<Arc<rustls::ServerConfig>>,
    /// To workers with `https://`; none: as this machine is set up.
    to_workers: Option<Arc<rustls::ClientConfig>>,
    /// Of all files that were read.
    digest: [u8; 32],
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls")
            .field("for_clients", &self.for_clients.is_some())
            .field("to_workers", &self.to_workers.is_some())
            .finish()
    }
}

impl Tls {
    /// How a worker of this name is spoken to.
    ///
    /// # Errors
    /// Nothing was said of whom to trust, and this machine trusts nobody.
    pub fn to_worker(
        &self,
        name: rustls::pki_types::ServerName<'static>,
    ) -> Result<tls::ToWorker, tls::Unusable> {
        let config = match &self.to_workers {
            Some(config) => config.clone(),
            None => tls::to_workers_by_default()?,
        };
        Ok(tls::ToWorker { name, config })
    }
}

impl PartialEq for Tls {
    /// The same files, whatever was made of them.
    fn eq(&self, other: &Tls) -> bool {
        self.digest == other.digest
    }
}

impl TlsSource {
    pub(super) fn from_args(args: &TlsArgs) -> Result<TlsSource, ConfigError> {
        let file = |flag, path: &Option<PathBuf>| {
            path.clone().map(|path| File {
                flag,
                path,
                stamp: None,
            })
        };
        let source = TlsSource {
            cert: file("tls-cert", &args.tls_cert),
            key: file("tls-key", &args.tls_key),
            client_ca: file("tls-client-ca", &args.tls_client_ca),
            ca: file("tls-ca", &args.tls_ca),
            worker_cert: file("tls-worker-cert", &args.tls_worker_cert),
            worker_key: file("tls-worker-key", &args.tls_worker_key),
        };
        let needs = |flag, has: bool, other: &str, has_other: bool| match has && !has_other {
            true => Err(ConfigError {
                flag,
                reason: format!("needs --{other}"),
            }),
            false => Ok(()),
        };
        let (cert, key) = (source.cert.is_some(), source.key.is_some());
        needs("tls-cert", cert, "tls-key", key)?;
        needs("tls-key", key, "tls-cert", cert)?;
        let client_ca = source.client_ca.is_some();
        needs("tls-client-ca", client_ca, "tls-cert", cert)?;
        let (cert, key) = (source.worker_cert.is_some(), source.worker_key.is_some());
        needs("tls-worker-cert", cert, "tls-worker-key", key)?;
        needs("tls-worker-key", key, "tls-worker-cert", cert)?;
        Ok(source)
    }

    fn files(&self) -> impl Iterator<Item = &File> {
        let all = [
            &self.cert,
            &self.key,
            &self.client_ca,
            &self.ca,
            &self.worker_cert,
            &self.worker_key,
        ];
        all.into_iter().flatten()
    }

    /// The flags that name a file.
    pub fn flags(&self) -> impl Iterator<Item = &'static str> {
        self.files().map(|file| file.flag)
    }

    /// What the files were when they were read.
    pub fn stamps(&self) -> Vec<Option<Stamp>> {
        self.files().map(|file| file.stamp).collect()
    }

    /// What the files are now; `None`: one cannot be looked at.
    pub fn stamps_now(&self) -> Vec<Option<Stamp>> {
        self.files().map(|file| Stamp::now(&file.path)).collect()
    }

    /// Reads the files and makes TLS of them. `old`: what holds; kept where the files say the same, so that clients that
    /// come back can go on with their sessions.
    ///
    /// # Errors
    /// A file cannot be read or used. No key is shown.
    pub fn read(&mut self, old: Option<&Tls>) -> Result<Tls, ConfigError> {
        let mut hash = Sha256::new();
        let mut read = |file: &mut Option<File>| {
            let content = file.as_mut().map(|file| {
                let bytes = file.read()?;
                Ok((file.flag, file.path.clone(), bytes))
            });
            let content: Option<(&'static str, PathBuf, Vec<u8>)> = content.transpose()?;
            let bytes = content.as_ref().map_or(&[][..], |(_, _, bytes)| bytes);
            // With their lengths, and a mark for none at all, no two sets of files look the same.
            hash.update([u8::from(content.is_some())]);
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
            Ok::<_, ConfigError>(content)
        };
        let [cert, key, client_ca, ca, worker_cert, worker_key] = [
            read(&mut self.cert)?,
            read(&mut self.key)?,
            read(&mut self.client_ca)?,
            read(&mut self.ca)?,
            read(&mut self.worker_cert)?,
            read(&mut self.worker_key)?,
        ];
        let digest = hash.finalize().into();
        if let Some(old) = old.filter(|old| old.digest == digest) {
            return Ok(old.clone());
        }
        let for_clients = match (pem(&cert), pem(&key)) {
            (Some(cert), Some(key)) => Some(tls::for_clients(cert, key, pem(&client_ca))),
            _ => None,
        };
        let identity = pem(&worker_cert).zip(pem(&worker_key));
        let is_default = ca.is_none() && identity.is_none();
        let to_workers = (!is_default).then(|| tls::to_workers(pem(&ca), identity));
        Ok(Tls {
            for_clients: for_clients.transpose().map_err(unusable)?,
            to_workers: to_workers.transpose().map_err(unusable)?,
            digest,
        })
    }
}

fn pem<'a>(content: &'a Option<(&'static str, PathBuf, Vec<u8>)>) -> Option<Pem<'a>> {
    let (flag, path, bytes) = content.as_ref()?;
    Some(Pem {
        flag,
        path: Path::new(path),
        bytes,
    })
}

fn unusable(e: tls::Unusable) -> ConfigError {
    ConfigError {
        flag: e.flag,
        reason: e.reason,
    }
}
