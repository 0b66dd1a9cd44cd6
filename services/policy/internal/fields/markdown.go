// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fields

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

const head = `# Fields of policies

What Sluice does with each field of each kind of policy. ` + "`sluice policy explain-field KIND[.PATH]`" + ` prints the same
for one field, without a running service. [policy.md](../policy.md#supported-fields) says how unsupported fields are
converted. A test writes this page from the decoder and checks each row with a manifest that has the field.

| support | meaning |
|---|---|
| enforced | the field decides which packets pass, as its kind defines |
| converted | not supported: the policy is accepted with a note, and its rule allows less than it says, or denies more |
| refused | a policy with the field is refused |
| no effect | the field is accepted, and no verdict depends on it |

A field marked * is required. Any other field is one that the kind does not have: a policy with it is refused, unless
` + "`--allow-unknown-fields`" + ` is given.
`

// Markdown returns the content of docs/reference/policy-fields.md.
func Markdown() string {
	var b strings.Builder
	b.WriteString(head)
	table := func(title, text string, of []Field) {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n| field | type | support | meaning |\n|---|---|---|---|\n", title, text)
		for _, f := range of {
			b.WriteString(f.line())
		}
	}
	common := Of("NetworkPolicy")
	outside := where(common, func(f Field) bool { return !inSpec(f) })
	table("Metadata", "Fields of all kinds. Differences are listed with the kind.", outside)
	var selectors []Field
	for _, f := range where(common, func(f Field) bool { return strings.HasPrefix(f.Path, "spec.podSelector.") }) {
		f.Path = strings.TrimPrefix(f.Path, "spec.podSelector.")
		selectors = append(selectors, f)
	}
	table("Label selectors", "Every field of the type selector has these fields.", selectors)
	for _, kind := range policy.Kinds() {
		like, text := "", versionsText(kind)
		switch kind {
		case "CiliumClusterwideNetworkPolicy":
			like = "CiliumNetworkPolicy"
		case "BaselineAdminNetworkPolicy":
			like = "AdminNetworkPolicy"
		}
		if like != "" {
			text += " The fields are the same as for " + like + ", except for these:"
		}
		known := map[string]string{}
		for _, f := range slices.Concat(outside, Of(like)) {
			known[f.Path] = f.line()
		}
		table(kind, text, where(Of(kind), func(f Field) bool {
			repeated := strings.HasPrefix(f.Path, "specs.") // the fields of specs repeat the fields of spec
			return !repeated && !f.selector && known[f.Path] != f.line()
		}))
	}
	return b.String()
}

// versionsText lists the group and versions of a kind.
func versionsText(kind string) string {
	return "`" + strings.Join(policy.Versions(kind), "`, `") + "`."
}

func inSpec(f Field) bool { return strings.HasPrefix(f.Path, "spec") }

func where(of []Field, keep func(Field) bool) (out []Field) {
	for _, f := range of {
		if keep(f) {
			out = append(out, f)
		}
	}
	return out
}

// line returns the row of a table.
func (f Field) line() string {
	mark, kind := "", f.Type
	if f.Required {
		mark = "*"
	}
	if f.field.Of != nil && strings.HasSuffix(f.field.Of.String(), ".LabelSelector") {
		kind = strings.Replace(kind, "object", "selector", 1)
	}
	return fmt.Sprintf("| `%s`%s | %s | %s | %s |\n", f.Path, mark, kind, f.support(), f.text())
}

// support returns the support of the field and its conditions.
func (f Field) support() string {
	text := string(f.Support)
	switch {
	case f.of != nil:
		text += ", as a part of " + f.of.field.Name
	case f.Becomes != "":
		text += ": " + f.Becomes
	}
	if f.Setting != "" {
		text += fmt.Sprintf("; refused without the setting %s of sluice-policy", f.Setting)
	}
	return text
}

// text returns the purpose of the field, with its values.
func (f Field) text() string {
	if len(f.Values) == 0 {
		return f.About
	}
	return f.About + " Values: " + strings.Join(f.Values, ", ") + "."
}
