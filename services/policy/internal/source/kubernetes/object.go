// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"encoding/json"
	"fmt"
	"slices"
	"unicode/utf8"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// object is an object as the API server sends it. Of the metadata, it keeps only the fields that a reflector and a
// policy need. Outside of the metadata, it keeps all fields except status. This includes unknown fields, because an
// unknown field may narrow a rule.
type object struct {
	metav1.TypeMeta
	metav1.ObjectMeta
	fields map[string]json.RawMessage // except version, kind, metadata and status
	status json.RawMessage
}

// UnmarshalJSON implements json.Unmarshaler.
func (o *object) UnmarshalJSON(data []byte) error {
	var whole struct {
		metav1.TypeMeta
		Metadata struct {
			Name            string            `json:"name"`
			Namespace       string            `json:"namespace"`
			Labels          map[string]string `json:"labels"`
			ResourceVersion string            `json:"resourceVersion"`
			UID             types.UID         `json:"uid"`
			Generation      int64             `json:"generation"`
			Annotations     map[string]string `json:"annotations"`

			CreationTimestamp metav1.Time `json:"creationTimestamp"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(data, &whole); err != nil {
		return err
	}
	*o = object{TypeMeta: whole.TypeMeta}
	m := &whole.Metadata
	o.Name, o.Namespace, o.Labels, o.ResourceVersion = m.Name, m.Namespace, m.Labels, m.ResourceVersion
	o.UID, o.Generation, o.CreationTimestamp = m.UID, m.Generation, m.CreationTimestamp
	if v, ok := m.Annotations[metav1.InitialEventsAnnotationKey]; ok { // set on a bookmark
		o.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: v}
	}
	if err := json.Unmarshal(data, &o.fields); err != nil {
		return err
	}
	o.status = o.fields["status"]
	for _, name := range []string{"apiVersion", "kind", "metadata", "status"} {
		delete(o.fields, name)
	}
	return nil
}

// DeepCopyObject implements runtime.Object. The content of an object is immutable.
func (o *object) DeepCopyObject() runtime.Object {
	out := *o
	return &out
}

// written returns the object as the text of a manifest. The text depends only on the spec and the labels, and not on
// other data that the API server reports.
func (o *object) written(kind, version string) policy.Written {
	metadata := map[string]any{"name": o.Name}
	if o.Namespace != "" {
		metadata["namespace"] = o.Namespace
	}
	if len(o.Labels) > 0 {
		metadata["labels"] = o.Labels
	}
	all := map[string]any{"apiVersion": version, "kind": kind, "metadata": metadata}
	for name, value := range o.fields {
		all[name] = value
	}
	text, err := json.Marshal(all)
	if err != nil {
		text = nil // cannot happen for JSON; an empty text isolates the pods that the object may select
	}
	key := policy.Key{Kind: kind, Namespace: o.Namespace, Name: o.Name}
	return policy.Written{
		Key: key, APIVersion: version, Text: append(printable(text), '\n'),
		Created: o.CreationTimestamp.UTC(), UID: string(o.UID),
	}
}

// record returns data of the object that is not in its manifest.
func (o *object) record() *policy.Record {
	r := &policy.Record{UID: string(o.UID), Generation: o.Generation, ResourceVersion: o.ResourceVersion}
	var status struct {
		Conditions json.RawMessage `json:"conditions"`
	}
	if json.Unmarshal(o.status, &status) == nil {
		r.Conditions = status.Conditions
	}
	return r
}

// printable escapes the characters in a JSON text that YAML does not allow, and replaces invalid characters.
func printable(text []byte) []byte {
	out := make([]byte, 0, len(text)+1)
	for len(text) > 0 {
		r, n := utf8.DecodeRune(text)
		switch {
		case r == utf8.RuneError && n == 1:
			out = utf8.AppendRune(out, utf8.RuneError)
		case 0x7f <= r && r <= 0x9f, r == 0xfeff, r == 0xfffe, r == 0xffff:
			out = fmt.Appendf(out, `\u%04x`, r)
		default:
			out = append(out, text[:n]...)
		}
		text = text[n:]
	}
	return out
}

// objects is a list of objects.
type objects struct {
	metav1.TypeMeta
	metav1.ListMeta `json:"metadata"`
	Items           []object `json:"items"`
}

// DeepCopyObject implements runtime.Object.
func (l *objects) DeepCopyObject() runtime.Object {
	out := *l
	out.Items = slices.Clone(l.Items)
	return &out
}
