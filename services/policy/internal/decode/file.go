// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package decode

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/networkpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// File is the content of a file with policies.
type File struct {
	// Policies are the policies of the documents. A policy that cannot be applied isolates the pods that it
	// selects, or its whole namespace; Object.Isolates contains the reason.
	Policies []Decoded
	// Skipped lists the documents that are not policies, and duplicates within the file.
	Skipped []string
	// Unreadable lists the documents whose namespace could not be determined, and groups of addresses that cannot be
	// applied.
	Unreadable []string
}

// File decodes each document of a file separately.
func (r Options) File(name string, data []byte) File {
	f := &file{options: r, name: name, seen: make(map[policy.Key]Decoded)}
	manifest.Each(data, func(doc manifest.Document) {
		d := one{Document: doc}
		if doc.Err != nil {
			f.unreadable(d, doc.Err.Error())
			return
		}
		items, err := doc.Items()
		if items == nil && err == nil {
			f.document(d)
			return
		}
		var problems manifest.Problems
		errors.As(err, &problems) //nolint:errcheck // Items returns no other errors
		for _, p := range problems {
			if p.Stops || p.Path == "" || manifest.Within(p.Path, "items") {
				f.unreadable(d, p.String()) // some of its objects could not be determined
			} else {
				f.Skipped = append(f.Skipped, d.violation("", p.Path, p.Text).String())
			}
		}
		for _, item := range items {
			d := one{item.Document, item.Path + "."}
			switch {
			case item.Document.Err != nil:
				f.unreadable(d, item.Err.Error())
			case item.Err != nil:
				d.Text = []byte("{}\n") // a minimal text that is stored in place of the document
				f.held(d, d.violation("", "", item.Err.Error()).String())
			default:
				f.document(d)
			}
		}
	})
	return f.File
}

// file is a file that is being read.
type file struct {
	File
	options Options
	name    string
	seen    map[policy.Key]Decoded
}

func (f *file) unreadable(d one, why string) {
	f.Unreadable = append(f.Unreadable, d.violation("", "", why).String())
}

func (f *file) document(d one) {
	version, kind := d.Type()
	if !policy.IsKind(version, kind) {
		f.other(d)
		return
	}
	object, name, bad := f.options.policy(d)
	if len(bad) > 0 {
		lines := make([]string, 0, len(bad))
		for _, v := range bad {
			lines = append(lines, v.String())
		}
		if len(lines) > maxReasons {
			lines = append(lines[:maxReasons], fmt.Sprintf("and %d more", len(bad)-maxReasons))
		}
		f.held(d, strings.Join(lines, "; "))
		return
	}
	decoded := Decoded{Object: &object, Text: trim(d.Text), Document: d.Number, Line: d.Line, item: d.path}
	first, again := f.seen[object.Key]
	switch {
	case !again:
		f.seen[object.Key] = decoded
		f.Policies = append(f.Policies, decoded)
	case bytes.Equal(first.Text, decoded.Text):
		f.Skipped = append(f.Skipped, d.violation(name, "", "duplicates an earlier document with the same text").String())
	case object.Group != nil:
		// A group selects no pods that could be isolated. Rules that refer to it may deny the addresses of
		// either document.
		why := fmt.Sprintf("%s is in document %d already", object.Key, first.Document+1)
		f.Unreadable = append(f.Unreadable, d.violation("", "", why).String())
	default:
		why := fmt.Sprintf("%s is in document %d already", object.Key, first.Document+1)
		f.Policies = append(f.Policies, f.options.Shadowed(f.name, decoded, why))
	}
}

// maxReasons limits the number of problems that are reported for a document.
const maxReasons = 5

// other handles a document that is not a policy according to its version and kind.
func (f *file) other(d one) {
	_, err := policy.Decode(d.Document, f.options.Rules)
	var problems manifest.Problems
	if !errors.As(err, &problems) {
		problems = manifest.Problems{{Path: "kind", Text: err.Error()}}
	}
	why := d.violation(d.Label(), problems[0].Path, problems[0].Text).String()
	switch d.standing() {
	case listed:
		f.Unreadable = append(f.Unreadable, why)
	case meant:
		f.held(d, why)
	default:
		f.Skipped = append(f.Skipped, why)
	}
}

// standing is the classification of a document whose version or kind does not belong to a policy.
type standing uint8

const (
	unrelated standing = iota // not a policy
	meant                     // a policy with a wrong or missing version or kind
	listed                    // a list of objects
)

// standing distinguishes objects that are not policies from policies whose version or kind is wrong.
func (d one) standing() standing {
	version, kind := d.Type()
	has := func(keys ...string) bool { return slices.ContainsFunc(keys, d.Has) }
	switch {
	case version == "" || kind == "":
		// Kustomize configurations and Helm values have none of these fields.
		if !has("metadata", "spec", "specs", "items", "apiVersion", "kind") {
			return unrelated
		}
		if has("items") {
			return listed
		}
		return meant
	case !policy.IsGroup(version):
		return unrelated
	case kind == "List", has("items"):
		return listed
	}
	base, isList := strings.CutSuffix(kind, "List")
	_, similar := policy.Similar(version, base)
	switch {
	case !similar:
		return unrelated
	case isList:
		return listed
	}
	return meant
}

// held adds a document that cannot be applied. It isolates the pods that the document selects, or else the document's
// namespace.
func (f *file) held(d one, why string) {
	why = f.name + ": " + why
	namespace, ok := d.Namespace()
	meta := networkpolicy.ObjectMeta{Name: "any", Namespace: namespace}
	var problems manifest.Problems
	meta.Validate(true, &problems)
	ok = ok && len(problems) == 0
	version, kind := d.Type()
	if meant, similar := policy.Similar(version, kind); similar {
		kind = meant
	}
	if kind != "" && !policy.Namespaced(kind) && policy.Versions(kind) != nil {
		namespace, ok = "", kind != "CiliumCIDRGroup" // a group has no namespace, and rules may deny its addresses
	}
	if !ok {
		f.Unreadable = append(f.Unreadable, strings.TrimPrefix(why, f.name+": "))
		return
	}
	decoded := Decoded{Text: isolating(why, trim(d.Text)), Document: d.Number, Line: d.Line, item: d.path}
	doc := d.Document
	if policy.Namespaced(kind) {
		doc = doc.WithNamespace(cmp.Or(f.options.Namespace, "default"))
	}
	if ob, err := policy.Isolate(doc, errors.New(why)); err == nil {
		if _, again := f.seen[ob.Key]; !again {
			decoded.Object = new(f.options.Isolated(ob.Key, decoded.Text, errors.New(why)))
			if decoded.Object.Key == ob.Key {
				f.seen[ob.Key] = decoded
				f.Policies = append(f.Policies, decoded)
				return
			}
		}
	}
	f.Policies = append(f.Policies, f.options.asDocument(f.name, decoded, namespace, why))
}

// Shadowed returns a policy that isolates the pods that it selects, because another policy of the same kind and name
// exists.
func (r Options) Shadowed(name string, d Decoded, why string) Decoded {
	d.Text = trim(d.Text)
	if _, text, ok := unmark(d.Text); ok {
		d.Text = text
	}
	place := Violation{Document: d.Document, Line: d.Line, Text: strings.TrimSuffix(d.item, ".")}
	why = fmt.Sprintf("%s (%s: %s)", why, name, strings.TrimSuffix(strings.TrimSpace(place.String()), ":"))
	d.Text = isolating(why, d.Text)
	return r.asDocument(name, d, d.Object.Key.Namespace, why)
}

// ShadowedObject is Shadowed for an object of an API server.
func (r Options) ShadowedObject(d Decoded, why string) Decoded {
	d.Text = isolating(why, trim(d.Text))
	d.Object = new(r.Isolated(ShadowKey(d.Object.Key), d.Text, errors.New(why)))
	return d
}

// ShadowKey returns another key for the policy k of an API server, because the key k already belongs to a policy of
// another source.
func ShadowKey(k policy.Key) policy.Key {
	return policy.Key{Kind: policy.KindDocument, Namespace: k.Namespace, Name: k.String()}
}

// asDocument gives an isolating object a key that contains its position in the file.
func (r Options) asDocument(name string, d Decoded, namespace, why string) Decoded {
	key := policy.Key{
		Kind: policy.KindDocument, Namespace: namespace,
		Name: strings.TrimSuffix(name+" document "+strconv.Itoa(d.Document+1)+" "+strings.TrimSuffix(d.item, "."), " "),
	}
	d.Object = new(r.Isolated(key, d.Text, errors.New(why)))
	return d
}

// mark begins the first line of the stored text of an isolating document. The rest of the line is the reason, which
// thus survives a restart.
const mark = "# sluice: what this document selects is isolated: "

// isolating returns the text of an isolating document.
func isolating(why string, text []byte) []byte {
	return append([]byte(mark+strconv.Quote(why)+"\n"), text...)
}

// Isolating reports whether a stored text is an isolating document, and the reason.
func Isolating(text []byte) (why string, ok bool) {
	why, _, ok = unmark(text)
	return why, ok
}

// KeyOf returns the kind and the name of the document in a text. It returns false if they are not valid for a policy.
func KeyOf(text []byte) (policy.Key, bool) {
	docs, err := manifest.Parse(text)
	if err != nil || len(docs) != 1 || policy.Versions(docs[0].Kind) == nil {
		return policy.Key{}, false
	}
	var meta networkpolicy.Meta
	if _, err := docs[0].Decode(&meta); err != nil && meta.Metadata.Name == "" {
		return policy.Key{}, false
	}
	key := policy.Key{Kind: docs[0].Kind, Name: meta.Metadata.Name}
	if policy.Namespaced(key.Kind) {
		key.Namespace = cmp.Or(meta.Metadata.Namespace, "default")
	}
	return key, key.Name != ""
}

func unmark(text []byte) (why string, rest []byte, ok bool) {
	line, rest, _ := bytes.Cut(text, []byte("\n"))
	quoted, ok := bytes.CutPrefix(line, []byte(mark))
	if !ok {
		return "", text, false
	}
	if why, err := strconv.Unquote(string(quoted)); err == nil {
		return why, rest, true
	}
	return string(quoted), rest, true
}
