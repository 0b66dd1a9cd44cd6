// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package peer

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	"github.com/sluice-net/sluice/model/label"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// IsLabels reports whether the text is a list of labels, because it contains characters that are not allowed in names
// of pods. A single label of a reserved identity, such as "reserved:host", is not a list.
func IsLabels(text string) bool {
	return strings.ContainsAny(text, "=,") ||
		strings.Contains(text, ":") && !isReserved(text) && !endpoint.HasPrefix(text)
}

func isReserved(text string) bool {
	return strings.HasPrefix(text, "reserved:") && !strings.ContainsAny(text, "=,")
}

// ParseLabels parses "k8s:app=web,tier". The default source of a label is k8s. If namespace is not empty, ParseLabels
// adds the label of the pod's namespace. If there is such a label, it also adds the label with the namespace's name,
// unless the text has it.
func ParseLabels(text, namespace string) ([]*workloadv1.Label, error) {
	var labels []*workloadv1.Label
	for one := range strings.SplitSeq(text, ",") {
		one = strings.TrimSpace(one)
		name, value, _ := strings.Cut(one, "=")
		source, key, found := strings.Cut(name, ":")
		if !found {
			source, key = label.SourceKubernetes, name
		}
		if source == "" || key == "" {
			return nil, invocation.Usagef("%q is not a label: want [SOURCE:]KEY[=VALUE]", one)
		}
		if find(labels, source, key) != nil {
			return nil, invocation.Usagef("%q: the label %s:%s is given twice", text, source, key)
		}
		labels = append(labels, &workloadv1.Label{Source: source, Key: key, Value: value})
	}
	given := find(labels, label.SourceKubernetes, label.KeyNamespace)
	switch {
	case namespace == "":
	case given == nil:
		given = &workloadv1.Label{Source: label.SourceKubernetes, Key: label.KeyNamespace, Value: namespace}
		labels = append(labels, given)
	case given.GetValue() != namespace:
		return nil, invocation.Usagef("%q has the namespace %s, but --namespace is %s", text, given.GetValue(), namespace)
	}
	if given.GetValue() != "" && find(labels, label.SourceKubernetes, label.KeyNamespaceName) == nil {
		labels = append(labels, &workloadv1.Label{
			Source: label.SourceKubernetes, Key: label.KeyNamespaceName, Value: given.GetValue(),
		})
	}
	return labels, nil
}

func find(labels []*workloadv1.Label, source, key string) *workloadv1.Label {
	for _, l := range labels {
		if l.GetSource() == source && l.GetKey() == key {
			return l
		}
	}
	return nil
}

// candidate is an identity of the cluster that has some of the given labels.
type candidate struct {
	number uint32
	texts  []string // its labels
	shared int      // number of the given labels that the identity has
}

// resolveLabels chooses the identity with exactly the given labels, or else the only identity that has all of them.
// Otherwise the peer keeps the labels, and the policy service evaluates them for a hypothetical workload.
func resolveLabels(ctx context.Context, inv *invocation.Invocation, p Peer) (Peer, error) {
	given := workload.LabelTexts(p.Labels)
	var all []candidate
	request := &identityv1.ListIdentitiesRequest{Scopes: []identityv1.Scope{identityv1.Scope_SCOPE_CLUSTER}}
	err := invocation.Each(ctx, inv, invocation.Identity, identityv1.IdentityServiceClient.ListIdentities, request,
		func(m *identityv1.ListIdentitiesResponse) {
			c := candidate{number: m.GetIdentity().GetNumber()}
			for _, l := range m.GetIdentity().GetLabels() {
				text := workload.LabelTexts([]*workloadv1.Label{l})[0]
				if l.GetSource() != label.SourceGenerated || slices.Contains(given, text) {
					c.texts = append(c.texts, text)
				}
			}
			slices.Sort(c.texts)
			for _, text := range given {
				if slices.Contains(c.texts, text) {
					c.shared++
				}
			}
			if c.shared > 0 {
				all = append(all, c)
			}
		})
	if err != nil {
		return p, fmt.Errorf("cannot find the identities with the labels %s: %w", p.Text, err)
	}
	// Sort the candidate that is nearest to the given labels first.
	slices.SortFunc(all, func(x, y candidate) int {
		return cmp.Or(cmp.Compare(y.shared, x.shared), cmp.Compare(len(x.texts), len(y.texts)),
			cmp.Compare(x.number, y.number))
	})
	with := 0 // number of identities that have all given labels
	for with < len(all) && all[with].shared == len(given) {
		with++
	}
	switch {
	case with > 0 && len(all[0].texts) == len(given):
		p.Identity = all[0].number
	case with == 1:
		p.Identity = all[0].number
		p.Note = fmt.Sprintf("%s is the identity %s, the only one with these labels", p.Text, all[0])
	case len(all) == 0:
		p.Note = fmt.Sprintf("no identity of the cluster has any of the labels %s; they are evaluated as given", p.Text)
	default:
		p.Note = fmt.Sprintf("no identity of the cluster has exactly the labels %s; they are evaluated as given; nearest: %s",
			p.Text, all[0])
		if with > 1 {
			p.Note = fmt.Sprintf("%d identities of the cluster have the labels %s among others; they are evaluated as given; "+
				"nearest: %s", with, p.Text, all[0])
		}
	}
	return p, nil
}

func (c candidate) String() string { return workload.IdentityText(c.number, c.texts) }
