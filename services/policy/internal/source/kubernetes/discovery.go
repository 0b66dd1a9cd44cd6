// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// lookTimeout limits one query for the kinds of an API server.
const lookTimeout = 10 * time.Second

// Discovery queries which kinds of policy an API server has.
type Discovery struct {
	rest   *rest.RESTClient
	groups map[string]bool // API groups with policies
}

// NewDiscovery returns a Discovery for an API server.
func NewDiscovery(api *kube.Client) (*Discovery, error) {
	client, err := rest.HTTPClientFor(api.Config)
	if err != nil {
		return nil, err
	}
	return newDiscovery(api, client)
}

func newDiscovery(api *kube.Client, client *http.Client) (*Discovery, error) {
	r, err := restFor(api.Config, client, policy.Versions("NetworkPolicy")[0], "NetworkPolicy")
	if err != nil {
		return nil, err
	}
	d := &Discovery{rest: r, groups: make(map[string]bool)}
	for _, kind := range policy.Kinds() {
		d.groups[groupVersion(policy.Versions(kind)[0]).Group] = true
	}
	return d, nil
}

// Look returns the kinds of policy that the API server has, as group/version/resource, sorted. all is true if the
// server has every kind in its preferred version, so that no kind can still appear.
func (d *Discovery) Look(ctx context.Context) (kinds []string, all bool, err error) {
	served, failed := d.resources(ctx)
	for _, group := range slices.Sorted(maps.Keys(failed)) {
		return nil, false, failed[group]
	}
	all = true
	for _, kind := range policy.Kinds() {
		resource := Resource(kind)
		for _, version := range served[resource] {
			kinds = append(kinds, version+"/"+resource)
		}
		all = all && slices.Contains(served[resource], policy.Versions(kind)[0])
	}
	slices.Sort(kinds)
	return kinds, all, nil
}

// resources queries the API groups that have policies. For each resource in these groups, including resources that
// Sluice does not know, it returns the versions that the API server serves. It also returns the groups for which the
// query failed.
func (d *Discovery) resources(ctx context.Context) (served map[string][]string, failed map[string]error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	served, failed = make(map[string][]string), make(map[string]error)
	none := func(err error) {
		for group := range d.groups {
			failed[group] = err
		}
	}
	var all struct {
		Groups []struct {
			Name     string `json:"name"`
			Versions []struct {
				GroupVersion string `json:"groupVersion"`
			} `json:"versions"`
		} `json:"groups"`
	}
	if err := d.get(ctx, "/apis", &all); err != nil {
		none(err)
	}
	for _, g := range all.Groups {
		if !d.groups[g.Name] {
			continue
		}
		for _, v := range g.Versions {
			var list struct {
				Resources []struct {
					Name string `json:"name"`
				} `json:"resources"`
			}
			if err := d.get(ctx, "/apis/"+v.GroupVersion, &list); err != nil {
				failed[g.Name] = err
			}
			for _, r := range list.Resources {
				served[r.Name] = append(served[r.Name], v.GroupVersion)
			}
		}
	}
	if len(failed) == 0 && len(served[Resource("NetworkPolicy")]) == 0 { // every API server has NetworkPolicy
		none(errors.New("the API server does not list networkpolicies, so its list of kinds is not trusted"))
	}
	return served, failed
}

func (d *Discovery) get(ctx context.Context, path string, into any) error {
	body, err := d.rest.Get().AbsPath(path).MaxRetries(0).Do(ctx).Raw()
	if err != nil {
		return fmt.Errorf("read the kinds of the API server: %w", err)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("read the kinds of the API server: %s: %w", path, err)
	}
	return nil
}
