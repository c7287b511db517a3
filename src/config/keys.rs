//! Where the keys of clients and of the admin come from, and what they are now.

use std::path::{Path, PathBuf};

use super::files::{self, Stamp};
use super::{ConfigError, KeyArgs, Secret};
use crate::access::{Access, Digest, KeyTable, keys};

/// Largest file of keys that is read.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// What was said of keys. Kept beside what came of it, so that the file can be read again without anything else.
#[derive(Clone, Debug, Default)]
pub struct KeySource {
    client: Option<Secret>,
    admin: Option<Secret>,
    file: Option<PathBuf>,
    /// Of the file that was read.
    stamp: Option<Stamp>,
}

impl KeySource {
    pub(super) fn from_args(args: &KeyArgs) -> KeySource {
        KeySource {
            client: args.client_api_key.clone(),
            admin: args.admin_api_key.clone(),
            file: args.client_api_keys_file.clone(),
            stamp: None,
        }
    }

    /// The file of clients' keys, if there is one.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// What the file was when it was read.
    pub fn stamp(&self) -> Option<Stamp> {
        self.stamp
    }

    /// What the file is now; `None`: it cannot be looked at.
    pub fn stamp_now(&self) -> Option<Stamp> {
        Stamp::now(self.file()?)
    }

    /// Reads the file, and makes the keys that hold of it and of the flags.
    ///
    /// # Errors
    /// The file cannot be read, a line or a flag cannot be, or a client has the admin's key. No key is shown.
    pub fn read(&mut self) -> Result<Access, ConfigError> {
        let of_flag = |flag| move |key: &Secret| checked(flag, key);
        let admin = self.admin.as_ref().map(of_flag("admin-api-key"));
        let admin = admin.transpose()?;
        let client = self.client.as_ref().map(of_flag("client-api-key"));
        let mut clients: Vec<Digest> = client.transpose()?.into_iter().collect();
        if let Some(path) = self.file.clone() {
            let refuse = |reason| ConfigError {
                flag: "client-api-keys-file",
                reason: format!("{}: {reason}", path.display()),
            };
            let text = self.read_file(&path).map_err(refuse)?;
            clients.extend(keys::parse(&text).map_err(refuse)?);
        }
        if admin.is_some_and(|admin| clients.contains(&admin)) {
            return Err(ConfigError {
                flag: "admin-api-key",
                reason: "is a client's key, too".to_owned(),
            });
        }
        let clients = KeyTable::new(clients);
        Ok(Access { clients, admin })
    }

    fn read_file(&mut self, path: &Path) -> Result<String, String> {
        let (bytes, stamp) = files::read(path, FILE_BYTES_MAX)?;
        self.stamp = Some(stamp);
        // Its own error would not show the text either, but let that not depend on it.
        String::from_utf8(bytes).map_err(|_| "is not UTF-8".to_owned())
    }
}

fn checked(flag: &'static str, key: &Secret) -> Result<Digest, ConfigError> {
    match keys::check(key.expose()) {
        Ok(()) => Ok(Digest::of(key.expose().as_bytes())),
        Err(reason) => Err(ConfigError {
            flag,
            reason: reason.to_owned(),
        }),
    }
}
