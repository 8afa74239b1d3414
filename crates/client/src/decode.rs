//! Tolerant decoding of objects, straight into the fields that are used.
//!
//! A part that cannot be parsed does not drop the object: a newer version may have written it, and one bad object must not
//! break the list or the watch of its kind. Fields that are not declared are skipped while parsing and take no memory.
//! `managedFields`, often the largest part of an object, are never kept.
//!
//! ```text
//! #[derive(Clone, Debug, Default, Deserialize)]
//! struct PeerStatus {
//!     #[serde(default, deserialize_with = "client::decode::or_default")]
//!     vtep: Option<Vtep>,
//! }
//! type PeerObject = Object<Ignored, Lenient<PeerStatus>>;
//! let api: Api<PeerObject> = Api::all_with(client, &ApiResource::erase::<NodeNetwork>(&()));
//! ```

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use kube::{
    Resource,
    core::{ApiResource, DynamicResourceScope},
};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, IgnoredAny},
};
use serde_json::value::RawValue;

/// An object of any kind, with the parts of it that are used.
#[derive(Clone, Debug, Deserialize)]
pub struct Object<Spec, Status> {
    /// Without managedFields.
    #[serde(deserialize_with = "metadata")]
    pub metadata: ObjectMeta,
    pub spec: Spec,
    pub status: Option<Status>,
}

/// An object of which only the metadata are requested.
#[derive(Clone, Debug, Deserialize)]
pub struct MetadataObject {
    /// Without managedFields.
    #[serde(deserialize_with = "metadata")]
    pub metadata: ObjectMeta,
}

/// A part of an object, or why it cannot be parsed. A missing part is parsed as an empty object.
#[derive(Clone, Debug)]
pub struct Lenient<T>(pub Result<T, String>);

/// A part that is not parsed.
#[derive(Clone, Debug, Default)]
pub struct Ignored;

/// The JSON text of a part, to be parsed later.
#[derive(Clone, Debug)]
pub struct Unparsed(Box<RawValue>);

impl<'de, T: DeserializeOwned> Deserialize<'de> for Lenient<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Option::<Box<RawValue>>::deserialize(deserializer)?;
        let text = text.as_ref().map_or("{}", |text| text.get());
        Ok(Self(serde_json::from_str(text).map_err(|error| {
            // The position is one in the API server's encoding, which users do not see.
            let text = error.to_string();
            text.rsplit_once(" at line ").map_or(text.clone(), |(text, _)| text.to_owned())
        })))
    }
}

impl<T: Default> Default for Lenient<T> {
    fn default() -> Self {
        Self(Ok(T::default()))
    }
}

impl<T: Default> Lenient<T> {
    /// The part, or its default if it cannot be parsed.
    pub fn or_default(self) -> T {
        self.0.unwrap_or_default()
    }
}

impl<'de> Deserialize<'de> for Ignored {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Option::<IgnoredAny>::deserialize(deserializer).map(|_| Self)
    }
}

impl<'de> Deserialize<'de> for Unparsed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Box::<RawValue>::deserialize(deserializer).map(Self)
    }
}

impl Unparsed {
    /// Parses the text, which may have any content.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.0.get())
    }
}

/// Parses a field; its default if the field cannot be parsed. For `#[serde(default, deserialize_with)]`.
pub fn or_default<'de, D: Deserializer<'de>, T: DeserializeOwned + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    let text = Box::<RawValue>::deserialize(deserializer)?;
    Ok(serde_json::from_str(text.get()).unwrap_or_default())
}

/// Parses a list without the elements that cannot be parsed. For `#[serde(default, deserialize_with)]`.
pub fn valid_items<'de, D: Deserializer<'de>, T: DeserializeOwned>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let items: Vec<Lenient<T>> = or_default(deserializer)?;
    Ok(items.into_iter().filter_map(|item| item.0.ok()).collect())
}

/// Parses metadata without managedFields. For `#[serde(deserialize_with)]`.
pub fn metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    /// The fields of ObjectMeta that are kept.
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Metadata {
        annotations: Option<BTreeMap<String, String>>,
        creation_timestamp: Option<Time>,
        deletion_grace_period_seconds: Option<i64>,
        deletion_timestamp: Option<Time>,
        finalizers: Option<Vec<String>>,
        generate_name: Option<String>,
        generation: Option<i64>,
        labels: Option<BTreeMap<String, String>>,
        name: Option<String>,
        namespace: Option<String>,
        owner_references: Option<Vec<OwnerReference>>,
        resource_version: Option<String>,
        uid: Option<String>,
    }
    let metadata = Metadata::deserialize(deserializer)?;
    Ok(ObjectMeta {
        annotations: metadata.annotations,
        creation_timestamp: metadata.creation_timestamp,
        deletion_grace_period_seconds: metadata.deletion_grace_period_seconds,
        deletion_timestamp: metadata.deletion_timestamp,
        finalizers: metadata.finalizers,
        generate_name: metadata.generate_name,
        generation: metadata.generation,
        labels: metadata.labels,
        managed_fields: None,
        name: metadata.name,
        namespace: metadata.namespace,
        owner_references: metadata.owner_references,
        resource_version: metadata.resource_version,
        self_link: None,
        uid: metadata.uid,
    })
}

impl<Spec, Status> Resource for Object<Spec, Status> {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn group(kind: &ApiResource) -> Cow<'_, str> {
        kind.group.as_str().into()
    }

    fn version(kind: &ApiResource) -> Cow<'_, str> {
        kind.version.as_str().into()
    }

    fn kind(kind: &ApiResource) -> Cow<'_, str> {
        kind.kind.as_str().into()
    }

    fn plural(kind: &ApiResource) -> Cow<'_, str> {
        kind.plural.as_str().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl Resource for MetadataObject {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn group(kind: &ApiResource) -> Cow<'_, str> {
        kind.group.as_str().into()
    }

    fn version(kind: &ApiResource) -> Cow<'_, str> {
        kind.version.as_str().into()
    }

    fn kind(kind: &ApiResource) -> Cow<'_, str> {
        kind.kind.as_str().into()
    }

    fn plural(kind: &ApiResource) -> Cow<'_, str> {
        kind.plural.as_str().into()
    }

    /// Requests contain only the metadata.
    fn metadata_api() -> bool {
        true
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use kube::core::{ObjectList, WatchEvent};
    use serde_json::json;

    use super::*;

    #[derive(Clone, Debug, Default, PartialEq, Deserialize)]
    struct TestStatus {
        #[serde(default)]
        count: u32,
        #[serde(default, deserialize_with = "or_default")]
        address: Option<u8>,
        #[serde(default, deserialize_with = "valid_items")]
        items: Vec<u8>,
    }

    type TestObject = Object<Ignored, Lenient<TestStatus>>;

    fn object(status: &str) -> String {
        format!(
            r#"{{"apiVersion": "v1", "kind": "Test", "metadata": {{"name": "a", "resourceVersion": "7", "labels": {{"l": "v"}},
            "managedFields": [{{"manager": "m", "operation": "Apply", "fieldsV1": {{"f:status": {{}}}}}}]}},
            "spec": {{"large": [1, 2, 3]}}, "status": {status}}}"#
        )
    }

    fn status(status: &str) -> Result<TestStatus, String> {
        serde_json::from_str::<TestObject>(&object(status)).unwrap().status.unwrap().0
    }

    #[test]
    fn managed_fields_are_dropped_and_other_metadata_are_kept() {
        let object: TestObject = serde_json::from_str(&object("{}")).unwrap();
        let labels = BTreeMap::from([("l".to_owned(), "v".to_owned())]);
        let kept = ObjectMeta {
            name: Some("a".to_owned()),
            resource_version: Some("7".to_owned()),
            labels: Some(labels),
            ..ObjectMeta::default()
        };
        assert_eq!(object.metadata, kept);
    }

    #[test]
    fn every_field_of_the_metadata_but_managed_fields_and_self_link_is_kept() {
        let all = json!({
            "annotations": {"a": "b"}, "creationTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30,
            "deletionTimestamp": "2026-01-02T00:00:00Z", "finalizers": ["f"], "generateName": "g-", "generation": 3,
            "labels": {"l": "v"}, "name": "n", "namespace": "ns",
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u", "controller": true}],
            "resourceVersion": "9", "uid": "u",
        });
        let object: MetadataObject = serde_json::from_value(json!({"metadata": all})).unwrap();
        assert_eq!(serde_json::to_value(object.metadata).unwrap(), all);
    }

    #[test]
    fn a_broken_part_keeps_the_object_and_says_why() {
        assert!(status(r#"{"count": "many"}"#).unwrap_err().contains("invalid type"));
        assert!(status("7").is_err());
        assert_eq!(status(r#"{"count": 2}"#).unwrap().count, 2);
        let missing: Object<Lenient<TestStatus>, Ignored> =
            serde_json::from_str(r#"{"metadata": {}}"#).unwrap();
        assert_eq!(missing.spec.or_default(), TestStatus::default());
        assert!(missing.status.is_none());
    }

    #[test]
    fn a_broken_field_becomes_its_default_and_a_broken_element_is_left_out() {
        let parsed = status(r#"{"count": 2, "address": {"no": 1}, "items": [1, "x", 300, 4]}"#).unwrap();
        assert_eq!(parsed, TestStatus { count: 2, address: None, items: vec![1, 4] });
        assert_eq!(status(r#"{"items": 7}"#).unwrap(), TestStatus::default());
    }

    #[test]
    fn one_broken_object_does_not_break_its_list_or_watch() {
        let (good, bad) = (object(r#"{"count": 1}"#), object("[]"));
        let list =
            format!(r#"{{"kind": "List", "apiVersion": "v1", "metadata": {{}}, "items": [{bad}, {good}]}}"#);
        let list: ObjectList<TestObject> = serde_json::from_str(&list).unwrap();
        let counts: Vec<u32> =
            list.items.into_iter().map(|one| one.status.unwrap().or_default().count).collect();
        assert_eq!(counts, [0, 1]);
        let event = format!(r#"{{"type": "MODIFIED", "object": {bad}}}"#);
        assert!(matches!(
            serde_json::from_str::<WatchEvent<TestObject>>(&event).unwrap(),
            WatchEvent::Modified(_)
        ));
    }

    #[test]
    fn an_unparsed_part_can_be_parsed_as_different_types() {
        let object: Object<Ignored, Unparsed> = serde_json::from_str(&object(r#"{"count": 5}"#)).unwrap();
        let status = object.status.unwrap();
        assert_eq!(status.parse::<TestStatus>().unwrap().count, 5);
        assert!(status.parse::<Vec<u8>>().is_err());
    }

    #[test]
    fn objects_that_are_built_from_values_are_decoded_too() {
        let value = json!({"metadata": {"name": "a"}, "status": {"count": 3, "items": [1]}});
        let object: TestObject = serde_json::from_value(value).unwrap();
        assert_eq!(object.status.unwrap().or_default().count, 3);
    }
}
