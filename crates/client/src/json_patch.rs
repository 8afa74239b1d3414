//! JSON patches with a `test` of strings.

use http::{Request, header::CONTENT_TYPE};
use serde_json::Value;

/// The request that patches the object at `path`.
pub fn patch_request(path: &str, operations: &Value) -> Result<Request<Vec<u8>>, kube::Error> {
    let request = Request::patch(path).header(CONTENT_TYPE, "application/json-patch+json");
    request.body(patch_text(operations).into_bytes()).map_err(kube::Error::HttpError)
}

/// The text of a patch. The API server compares the strings of a `test` as they are written in JSON, and writes its own ones
/// as Go does: these characters are escaped. They occur only in strings.
fn patch_text(operations: &Value) -> String {
    let mut text = String::new();
    for c in operations.to_string().chars() {
        match c {
            '<' => text.push_str("\\u003c"),
            '>' => text.push_str("\\u003e"),
            '&' => text.push_str("\\u0026"),
            '\u{2028}' => text.push_str("\\u2028"),
            '\u{2029}' => text.push_str("\\u2029"),
            other => text.push(other),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn strings_are_written_as_the_api_server_writes_them() {
        let operations =
            json!([{"op": "test", "path": "/x", "value": "<nil> & \u{2028}\u{2029} \\u003c \"é\""}]);
        let text = patch_text(&operations);
        let value = r#""value":"\u003cnil\u003e \u0026 \u2028\u2029 \\u003c \"é\"""#;
        assert!(text.contains(value), "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), operations);
    }
}
