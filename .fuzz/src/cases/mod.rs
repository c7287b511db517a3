//! One function a target: bytes in, and a panic if something that must hold does not.

mod chunks;
mod json;
mod relay;
mod request_head;
mod response_head;
mod schedules;
mod splice;

pub use chunks::chunks;
pub use json::json;
pub use relay::relay;
pub use request_head::request_head;
pub use response_head::response_head;
pub use schedules::{exchange, exchange_pd};
pub use splice::splice;
