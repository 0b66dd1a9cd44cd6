// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package overview

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
)

// ciliumGroup is the API group of Cilium. Sluice watches only its policies.
const ciliumGroup = "cilium.io"

// withEffect are the kinds of Cilium that Sluice watches.
var withEffect = []string{"CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy", "CiliumCIDRGroup"}

// ofAgents are the kinds that Cilium itself writes. They remain after Cilium was removed, and ask for nothing.
var ofAgents = []string{"CiliumNode", "CiliumEndpoint", "CiliumEndpointSlice", "CiliumIdentity", "CiliumBGPNodeConfig"}

// ineffective returns a warning for each kind of Cilium with objects that have no effect, and for each kind of which
// this is not known.
func ineffective(ctx context.Context, client *kubectl.Client) []string {
	unknown := func(what string, err error) string {
		return fmt.Sprintf("not known whether %s exist, which have no effect: %v", what, err)
	}
	out, err := client.Run(ctx, "api-resources", "--api-group="+ciliumGroup, "--no-headers")
	if err != nil {
		return []string{unknown("objects of "+ciliumGroup, err)}
	}
	warnings := []string{}
	for line := range strings.Lines(string(out)) {
		// NAME [SHORTNAMES] APIVERSION NAMESPACED KIND
		words := strings.Fields(line)
		if len(words) < 4 {
			continue
		}
		resource, version, kind := words[0], words[len(words)-3], words[len(words)-1]
		if slices.Contains(withEffect, kind) || slices.Contains(ofAgents, kind) {
			continue
		}
		n, err := countObjects(ctx, client, version, resource)
		switch {
		case err != nil:
			warnings = append(warnings, unknown("objects of kind "+kind, err))
		case n > 0:
			warnings = append(warnings, fmt.Sprintf("%s of kind %s, which Sluice does not implement: no effect",
				output.Plural(n, "object", "objects"), kind))
		}
	}
	return warnings
}

// countObjects returns the number of objects of a resource in all namespaces.
func countObjects(ctx context.Context, client *kubectl.Client, version, resource string) (int, error) {
	out, err := client.Run(ctx, "get", "--raw=/apis/"+version+"/"+resource+"?limit=1")
	if err != nil {
		return 0, err
	}
	var list struct {
		Metadata struct{ RemainingItemCount int }
		Items    []struct{}
	}
	if err := json.Unmarshal(out, &list); err != nil {
		return 0, err
	}
	return len(list.Items) + list.Metadata.RemainingItemCount, nil
}
