//! A worker's URL as configured or added: `http://host[:port][/prefix]` or `https://`, checked once, then only compared and shown.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use url::{Host, Url};

/// Where a worker is. Two are equal when they mean the same place, however they are written.
#[derive(Clone, Debug)]
pub struct WorkerUrl {
    text: Arc<str>,
    host: Arc<str>,
    port: u16,
    authority: Arc<str>,
    path_prefix: Arc<str>,
    server_name: Option<ServerName<'static>>,
}

/// Why a text is not a worker's URL. Shown to operators only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerUrlError {
    /// As given, or hidden where it holds a password.
    pub text: String,
    /// In words.
    pub reason: &'static str,
}

impl fmt::Display for WorkerUrlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "worker URL '{}': {}", self.text, self.reason)
    }
}

impl std::error::Error for WorkerUrlError {}

const FORM: &str = "must be http://host[:port][/prefix], or https://";

impl WorkerUrl {
    /// Reads and checks a URL.
    ///
    /// # Errors
    /// Anything but `http://host[:port][/prefix]` and `https://`: other schemes, user info, query, fragment, odd bytes.
    pub fn parse(text: &str) -> Result<WorkerUrl, WorkerUrlError> {
        let shown = || text.chars().take(200).collect::<String>();
        let refuse = |reason| {
            Err(WorkerUrlError {
                text: shown(),
                reason,
            })
        };
        // What goes into log lines and metric labels stays free of quotes, backslashes and control characters.
        if !text
            .bytes()
            .all(|b| b.is_ascii_graphic() && !matches!(b, b'"' | b'\\' | b'<' | b'>'))
        {
            return refuse(
                "holds a character that has no place in a URL; must be http://host[:port][/prefix]",
            );
        }
        let Ok(url) = Url::parse(text) else {
            return refuse(FORM);
        };
        if !url.username().is_empty() || url.password().is_some() {
            let text = format!("{}://***@...", url.scheme());
            return Err(WorkerUrlError {
                text,
                reason: "user info is not taken; use --api-key",
            });
        }
        let is_tls = match url.scheme() {
            "http" => false,
            "https" => true,
            "grpc" | "grpcs" => {
                return refuse("gRPC workers are not supported; use the worker's HTTP port");
            }
            _ => return refuse(FORM),
        };
        // The URL standard also reads http:a and http:///a as http://a; a typing error is likelier.
        let after = text
            .get(url.scheme().len()..)
            .and_then(|rest| rest.strip_prefix("://"));
        if after.is_none_or(|after| after.starts_with('/')) {
            return refuse(FORM);
        }
        if url.query().is_some() || url.fragment().is_some() {
            return refuse("a query or fragment is not taken; must be http://host[:port][/prefix]");
        }
        let Some(host) = url.host() else {
            return refuse(FORM);
        };
        let port = url.port_or_known_default().unwrap_or(80);
        if port == 0 {
            return refuse("port 0 cannot be connected to");
        }
        let authority = match url.port() {
            Some(port) => format!("{host}:{port}"),
            None => host.to_string(),
        };
        let bare_host = match &host {
            Host::Ipv6(address) => address.to_string(),
            other => other.to_string(),
        };
        let server_name = match is_tls.then(|| ServerName::try_from(bare_host.clone())) {
            Some(Err(_)) => return refuse("has a host that no certificate can be for"),
            Some(Ok(name)) => Some(name),
            None => None,
        };
        Ok(WorkerUrl {
            text: text.trim_end_matches('/').into(),
            host: bare_host.into(),
            port,
            authority: authority.into(),
            path_prefix: url.path().trim_end_matches('/').into(),
            server_name,
        })
    }

    /// As the operator wrote it, without a trailing slash.
    pub fn text(&self) -> &Arc<str> {
        &self.text
    }

    /// The same at an address that the host's name, or that of a `target` in its place, stands for. `Host` field and
    /// certificate stay those of the name.
    pub fn at(&self, target: Option<&str>, address: IpAddr, port: u16) -> Option<WorkerUrl> {
        let scheme = self.scheme();
        let name = match target {
            None => self.clone(),
            Some(target) => {
                let text = format!("{scheme}://{target}:{port}{}", self.path_prefix);
                WorkerUrl::parse(&text).ok()?
            }
        };
        let at = SocketAddr::new(address, port);
        let url = WorkerUrl::parse(&format!("{scheme}://{at}{}", self.path_prefix)).ok()?;
        Some(WorkerUrl {
            authority: name.authority,
            server_name: name.server_name,
            ..url
        })
    }

    /// Name or address, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Port to connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// With `https://`: the name or address that its certificate must be for.
    pub fn server_name(&self) -> Option<&ServerName<'static>> {
        self.server_name.as_ref()
    }

    /// The `Host` field (RFC 9112 section 3.2): the port only where it is not the scheme's own.
    pub fn authority(&self) -> &Arc<str> {
        &self.authority
    }

    /// `host:port`, an IPv6 address in brackets, the port always there.
    pub fn host_and_port(&self) -> String {
        self.host_with(self.port)
    }

    /// Another port of the same host: `http://host:port`.
    pub fn on_port(&self, port: u16) -> String {
        format!("http://{}", self.host_with(port))
    }

    fn host_with(&self, port: u16) -> String {
        if self.host.contains(':') {
            format!("[{}]:{port}", self.host)
        } else {
            format!("{}:{port}", self.host)
        }
    }

    /// The same for two that are equal.
    pub fn canonical(&self) -> String {
        format!(
            "{}://{}{}",
            self.scheme(),
            self.host_and_port(),
            self.path_prefix
        )
    }

    fn scheme(&self) -> &'static str {
        match self.server_name {
            Some(_) => "https",
            None => "http",
        }
    }

    /// `""`, or `/prefix` without a trailing slash.
    pub fn path_prefix(&self) -> &Arc<str> {
        &self.path_prefix
    }
}

impl PartialEq for WorkerUrl {
    fn eq(&self, other: &WorkerUrl) -> bool {
        self.host == other.host
            && self.port == other.port
            && self.path_prefix == other.path_prefix
            // The name follows from the host, or the host from it.
            && self.server_name.is_some() == other.server_name.is_some()
    }
}

impl Eq for WorkerUrl {}

impl fmt::Display for WorkerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_urls_are_taken_apart() {
        let table = [
            ("http://a:8000", "http://a:8000", "a", 8000, "a:8000", ""),
            ("http://a:8000/", "http://a:8000", "a", 8000, "a:8000", ""),
            ("http://a", "http://a", "a", 80, "a", ""),
            ("http://a:80/", "http://a:80", "a", 80, "a", ""),
            (
                "HTTP://A.b/x/y/",
                "HTTP://A.b/x/y",
                "a.b",
                80,
                "a.b",
                "/x/y",
            ),
            ("https://a", "https://a", "a", 443, "a", ""),
            (
                "HTTPS://[::1]:8443/x",
                "HTTPS://[::1]:8443/x",
                "::1",
                8443,
                "[::1]:8443",
                "/x",
            ),
            ("http://[::1]:9", "http://[::1]:9", "::1", 9, "[::1]:9", ""),
            (
                "http://10.0.0.1:65535",
                "http://10.0.0.1:65535",
                "10.0.0.1",
                65535,
                "10.0.0.1:65535",
                "",
            ),
        ];
        for (given, text, host, port, authority, prefix) in table {
            let url = WorkerUrl::parse(given).unwrap();
            let got = (
                &*url.text,
                url.host(),
                url.port(),
                &*url.authority,
                &*url.path_prefix,
            );
            assert_eq!(got, (text, host, port, authority, prefix), "{given}");
        }
    }

    #[test]
    fn bad_urls_are_refused_and_named() {
        let table = [
            "",
            "a:8000",
            "a",
            "ftp://a",
            "https:a",
            "https:///x",
            "grpc://a:1",
            "http://",
            "http:///x",
            "http:a",
            "http:/a",
            "http://a:0",
            "http://a:65536",
            "http://a?x=1",
            "http://a#f",
            "http://a b",
            "http://a/\"x",
            "http://a\\b",
            "ht!tp:/nonsense",
        ];
        for given in table {
            let error = WorkerUrl::parse(given).expect_err(given);
            assert!(error.to_string().contains(given), "{error}");
        }
    }

    #[test]
    fn a_password_is_not_repeated() {
        let error = WorkerUrl::parse("http://me:secret@a").unwrap_err();
        assert!(!error.to_string().contains("secret"), "{error}");
    }

    #[test]
    fn the_same_place_is_the_same_worker() {
        let parse = |text| WorkerUrl::parse(text).unwrap();
        assert_eq!(parse("http://a"), parse("http://A:80/"));
        assert_ne!(parse("http://a"), parse("http://a:81"));
        assert_ne!(parse("http://a:443"), parse("https://a"));
        assert_ne!(parse("http://a"), parse("http://a/x"));
    }
}
