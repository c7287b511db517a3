//! Who may ask for what: clients' keys and the admin's, and which paths need which. Pure; asked by the cores for each
//! request where a key is set, and by the control plane for its own listeners.
//!
//! # Threat model
//!
//! Strangers can reach the data port; so can clients, who have a key each and must not rule the fleet, neither ours
//! nor an engine behind us. What they learn from an answer is one of four constant texts. What they could learn from its
//! time is the subject of [`keys`]. Not kept out: who can read the process' memory, its environment or the key file.
//!
//! | path | nobody's key | a client's key | the admin's key |
//! |---|---|---|---|
//! | `/health`, `/health_generate`, `/liveness`, `/readiness` | yes | yes | yes |
//! | inference, `/v1/models`, `/get_model_info`, all that is passed on | 401 | yes | yes |
//! | our admin paths, an engine's ([`paths`]) | 401 | 403 | yes |
//!
//! Without clients' keys the second line is open to all. Without an admin's key a client's does for the third; without
//! either all is open.
#![forbid(unsafe_code)]

pub mod keys;
pub mod paths;

pub use keys::{Digest, KeyTable};
pub use paths::Need;

/// Whose a key is. The admin may do what clients may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Caller {
    /// A client's.
    Client,
    /// The admin's.
    Admin,
}

/// What a request brought, each place judged for itself; `None`: no key of ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Presented {
    /// Of `Authorization: Bearer`.
    pub authorization: Option<Caller>,
    /// Of `X-Api-Key`, as clients of `/v1/messages` send.
    pub api_key: Option<Caller>,
}

impl Presented {
    /// The better of both.
    pub fn caller(self) -> Option<Caller> {
        self.authorization.max(self.api_key)
    }
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// It brought no key, or none that we know.
    NoKey,
    /// It brought a client's key, and needs the admin's.
    NotAdmin,
    /// The path is not served here.
    NotHere,
}

impl Denied {
    /// HTTP status.
    pub fn status(self) -> u16 {
        match self {
            Denied::NoKey => 401,
            Denied::NotAdmin => 403,
            Denied::NotHere => 404,
        }
    }

    /// OpenAI's `code`.
    pub fn code(self) -> &'static str {
        match self {
            Denied::NoKey => "invalid_api_key",
            Denied::NotAdmin => "admin_key_required",
            Denied::NotHere => "not_found",
        }
    }

    /// In words that are the same for everybody.
    pub fn message(self) -> &'static str {
        match self {
            Denied::NoKey => {
                "a valid API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            }
            Denied::NotAdmin => "this path needs the admin's API key",
            Denied::NotHere => "no such path",
        }
    }
}

/// The keys that hold. Made with the configuration, and again when the key file changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Clients' keys; `None`: clients need none.
    pub clients: Option<KeyTable>,
    /// The admin's key; `None`: there is none.
    pub admin: Option<Digest>,
}

impl Access {
    /// Nobody needs a key: nothing is to be looked at.
    pub fn is_open(&self) -> bool {
        self.clients.is_none() && self.admin.is_none()
    }

    /// Judges what a request brought, by the values of its two fields.
    pub fn judge(&self, authorization: Option<&[u8]>, api_key: Option<&[u8]>) -> Presented {
        if self.is_open() {
            return Presented::default();
        }
        let whose = |key: &[u8]| self.whose(key);
        Presented {
            authorization: authorization.and_then(bearer).and_then(whose),
            api_key: api_key.and_then(whose),
        }
    }

    fn whose(&self, key: &[u8]) -> Option<Caller> {
        if key.is_empty() || key.len() > keys::KEY_BYTES_MAX {
            return None;
        }
        let digest = Digest::of(key);
        // Both are always asked, so that the time does not say which of them it was.
        let is_admin = self.admin.as_ref().is_some_and(|admin| *admin == digest);
        let is_client = self.clients.as_ref().is_some_and(|all| all.holds(&digest));
        match (is_admin, is_client) {
            (true, _) => Some(Caller::Admin),
            (false, true) => Some(Caller::Client),
            (false, false) => None,
        }
    }

    /// Whether this caller may have what needs so much.
    ///
    /// # Errors
    /// Why not.
    pub fn permit(&self, need: Need, caller: Option<Caller>) -> Result<(), Denied> {
        let (needs_admin, needs_client) = match need {
            Need::Nothing => (false, false),
            Need::Client => (false, self.clients.is_some()),
            // Everything but health asks for a key where any is set.
            Need::Admin => (self.admin.is_some(), self.clients.is_some()),
        };
        match caller {
            Some(Caller::Admin) => Ok(()),
            Some(Caller::Client) if needs_admin => Err(Denied::NotAdmin),
            Some(Caller::Client) => Ok(()),
            None if needs_admin || needs_client => Err(Denied::NoKey),
            None => Ok(()),
        }
    }
}

/// The token of `Bearer TOKEN` (RFC 6750 section 2.1; a scheme's name has no case, RFC 9110 section 11.1).
pub fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked("bearer ".len())?;
    scheme
        .eq_ignore_ascii_case(b"bearer ")
        .then(|| token.trim_ascii())
}

#[cfg(test)]
mod tests;
