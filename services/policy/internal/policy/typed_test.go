// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy_test

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/services/policy/internal/adminpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/cilium"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/networkpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/test/vectors"
)

var options = rule.Options{Cluster: "default", LocalClusterOnly: true}

// structOf is a new struct of a kind.
func structOf(kind string) any {
	switch kind {
	case "NetworkPolicy":
		return new(networkpolicy.NetworkPolicy)
	case "CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy":
		return new(cilium.NetworkPolicy)
	case "CiliumCIDRGroup":
		return new(cilium.CIDRGroup)
	case "ClusterNetworkPolicy":
		return new(adminpolicy.Policy)
	}
	return new(adminpolicy.OldPolicy)
}

// A typed object is the same policy as the manifest that it was decoded from,
// and so is the text that is kept of it; what other readers of the client see of
// it stays as it was.
func TestTypedObjectIsThePolicyOfItsManifest(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "..", "testdata", "policy-vectors", "*.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]int)
	known := make(map[string]bool)
	look := func(raw []byte) error {
		if text := string(raw); !known[text] {
			known[text] = true
		} else {
			return nil
		}
		docs, err := manifest.Parse(raw)
		if err != nil || len(docs) != 1 || !policy.IsKind(docs[0].APIVersion, docs[0].Kind) {
			return nil // no object, which vectors have too
		}
		doc := docs[0]
		typed := policy.Typed{APIVersion: doc.APIVersion, Kind: doc.Kind, Object: structOf(doc.Kind)}
		if unknown, err := doc.Decode(typed.Object); err != nil || len(unknown) > 0 {
			return nil // a client with such an object has a document
		}
		before, err := typed.Text()
		if err != nil {
			return err
		}
		for name, decode := range map[string]func(policy.Form, rule.Options) (policy.Object, error){"decode": policy.Decode, "held": policy.DecodeHeld} {
			want, wantErr := decode(doc, options)
			got, err := decode(typed, options)
			if !reflect.DeepEqual(got, want) || !reflect.DeepEqual(err, wantErr) {
				return fmt.Errorf("%s %s: %+v, %w\nwant %+v, %w", name, raw, got, err, want, wantErr)
			}
			again, err := manifest.Parse(before)
			if err != nil || len(again) != 1 {
				return fmt.Errorf("%s: %d documents, %w", before, len(again), err)
			}
			if got, err = decode(again[0], options); !reflect.DeepEqual(got, want) || !reflect.DeepEqual(err, wantErr) {
				return fmt.Errorf("%s of its text %s: %+v, %w\nwant %+v, %w", name, before, got, err, want, wantErr)
			}
		}
		if after, err := typed.Text(); err != nil || !bytes.Equal(before, after) {
			return fmt.Errorf("decoding made %s\nof %s (%w)", after, before, err)
		}
		seen[doc.Kind]++
		return nil
	}
	for _, file := range files {
		cases := 0
		if err := vectors.Read(file, func(c *vectors.Case) error {
			if cases++; strings.Contains(file, "fuzz") && cases%8 != 0 {
				return nil // a part of them is enough here
			}
			all := [][]byte{c.Manifest}
			for _, s := range c.Steps {
				for _, raw := range s.Apply {
					all = append(all, raw)
				}
			}
			for _, raw := range all {
				if err := look(raw); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	for kind, least := range map[string]int{
		"NetworkPolicy": 300, "CiliumNetworkPolicy": 500, "CiliumClusterwideNetworkPolicy": 10, "CiliumCIDRGroup": 1,
		"ClusterNetworkPolicy": 10,
	} {
		if seen[kind] < least {
			t.Errorf("%d objects of kind %s, want %d: %v", seen[kind], kind, least, seen)
		}
	}
}

func TestTypedObjectOfAnotherKindIsRefused(t *testing.T) {
	for _, typed := range []policy.Typed{
		{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy", Object: new(cilium.NetworkPolicy)},
		{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy", Object: (*networkpolicy.NetworkPolicy)(nil)},
		{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"},
		{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy", Object: networkpolicy.NetworkPolicy{}},
		{APIVersion: "v1", Kind: "Pod", Object: new(networkpolicy.NetworkPolicy)},
	} {
		for _, decode := range []func(policy.Form, rule.Options) (policy.Object, error){policy.Decode, policy.DecodeHeld} {
			if _, err := decode(typed, options); err == nil {
				t.Errorf("%+v is accepted", typed)
			}
		}
	}
	var problems manifest.Problems
	_, err := policy.Decode(policy.Typed{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy", Object: 7}, options)
	if !errors.As(err, &problems) || !strings.Contains(err.Error(), "is a int") {
		t.Errorf("got %v, want a problem that names the type", err)
	}
	if text, err := (policy.Typed{Object: 7}).Text(); err == nil {
		t.Errorf("the text of a number is %q", text)
	}
}
