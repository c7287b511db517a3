//! Where load goes.

use std::net::{SocketAddr, ToSocketAddrs};

use url::Url;

/// A router or a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// As it was given.
    pub url: String,
    /// Its first address.
    pub address: SocketAddr,
    /// Value of `Host`.
    pub host: String,
    /// What stands before each path; empty, or begins with a slash and ends without.
    pub prefix: String,
}

impl Target {
    /// Reads a URL and resolves its name, once.
    ///
    /// # Errors
    /// It is no `http://` URL, or its name has no address.
    pub fn parse(text: &str) -> Result<Target, String> {
        let url = Url::parse(text).map_err(|e| format!("{text}: {e}"))?;
        if url.scheme() != "http" {
            return Err(format!(
                "{text}: only http:// (TLS would measure the generator's own)"
            ));
        }
        let host = url.host_str().ok_or_else(|| format!("{text}: no host"))?;
        let port = url.port_or_known_default().unwrap_or(80);
        let named = |e: std::io::Error| format!("{text}: {e}");
        // The brackets of an IPv6 address belong to the URL.
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let mut addresses = (bare, port).to_socket_addrs().map_err(named)?;
        Ok(Target {
            url: text.to_owned(),
            address: addresses
                .next()
                .ok_or_else(|| format!("{text}: no address"))?,
            host: format!("{host}:{port}"),
            prefix: url.path().trim_end_matches('/').to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_and_others_refused() {
        let target = Target::parse("http://127.0.0.1:8000/v/").unwrap();
        assert_eq!(target.address, "127.0.0.1:8000".parse().unwrap());
        assert_eq!(
            (target.host.as_str(), target.prefix.as_str()),
            ("127.0.0.1:8000", "/v")
        );
        let target = Target::parse("http://[::1]").unwrap();
        assert_eq!(
            (target.host.as_str(), target.prefix.as_str()),
            ("[::1]:80", "")
        );
        assert_eq!(target.address, "[::1]:80".parse().unwrap());
        for wrong in ["https://a", "127.0.0.1:8000", "a", ""] {
            assert!(Target::parse(wrong).is_err(), "{wrong}");
        }
    }
}
