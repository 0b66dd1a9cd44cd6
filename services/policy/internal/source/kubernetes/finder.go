// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// absences is how many looks in a row have to miss a kind of which there are
// policies, until it is gone with them: an API server that starts does not name
// all its kinds at once.
const absences = 3

// Times of a finder.
const (
	lookTimeout = 10 * time.Second // of one look
	again       = 5 * time.Second  // between two looks at a kind that is missing, at least
	rescan      = 30 * time.Second // between two looks for kinds that may appear, at least
)

// finder looks which kinds the API server has, until each is watched in its best
// version, and whenever one is not found any more.
type finder struct {
	source *Source
	client *http.Client
	rest   *rest.RESTClient
	kinds  []*watched
	wake   chan struct{} // has a token when a kind is missing
}

func (f *finder) run(ctx context.Context) {
	defer func() {
		for _, k := range f.kinds {
			k.end()
		}
	}()
	for {
		served, failed := f.look(ctx)
		if ctx.Err() != nil {
			return
		}
		for _, k := range f.kinds {
			if err := failed[k.group]; err == nil {
				f.settle(ctx, k, served[k.resource])
			} else if k.absent = 0; k.version == "" {
				k.joint.Failed(k.resource, plain(err))
			}
		}
		var due <-chan time.Time
		wake := f.wake
		if wait := f.pause(len(failed) > 0); wait > 0 {
			due = time.After(wait + rand.N(wait/2))
			if wait == again {
				wake = nil
			}
		}
		select {
		case <-due:
		case <-wake:
		case <-ctx.Done():
			return
		}
	}
}

// pause is how long to wait for the next look; zero: until a kind is missing.
func (f *finder) pause(failed bool) time.Duration {
	wait := time.Duration(0)
	for _, k := range f.kinds {
		switch {
		case failed, k.absent > 0 && k.absent < absences:
			return again
		case k.version != policy.Versions(k.kind)[0]:
			wait = rescan
		}
	}
	return wait
}

// settle watches the kind in the best version that is served.
func (f *finder) settle(ctx context.Context, k *watched, served []string) {
	for _, version := range policy.Versions(k.kind) {
		if !slices.Contains(served, version) {
			continue
		}
		k.absent = 0
		if k.version == version {
			return
		}
		f.source.log.Info("policies are watched", "resource", k.resource, "version", version)
		if err := k.watch(ctx, f.source.api, f.client, version); err != nil {
			k.joint.Failed(k.resource, err)
		}
		return
	}
	if len(served) > 0 {
		k.end()
		k.absent = 0
		k.joint.Failed(k.resource, fmt.Errorf("the API server has it in %s, of which none is known here: "+
			"nothing of it is enforced but what was before", strings.Join(served, ", ")))
		return
	}
	// What was never here is not waited for: nothing is deleted for it.
	if k.absent++; k.absent >= absences || k.version == "" && len(k.keys) == 0 {
		if n := k.gone(); n > 0 {
			f.source.log.Warn("the API server has a kind of policy no more; its policies are deleted",
				"resource", k.resource, "policies", n)
		}
	}
}

func (f *finder) missing() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// look says in which versions the API server has each resource of the groups
// that have policies, those too that are not known here, and of which groups that
// cannot be said.
func (f *finder) look(ctx context.Context) (served map[string][]string, failed map[string]error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	served, failed = make(map[string][]string), make(map[string]error)
	none := func(err error) {
		for _, k := range f.kinds {
			failed[k.group] = err
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
	if err := f.get(ctx, "/apis", &all); err != nil {
		none(err)
	}
	for _, g := range all.Groups {
		if !slices.ContainsFunc(f.kinds, func(k *watched) bool { return k.group == g.Name }) {
			continue
		}
		for _, v := range g.Versions {
			var list struct {
				Resources []struct {
					Name string `json:"name"`
				} `json:"resources"`
			}
			if err := f.get(ctx, "/apis/"+v.GroupVersion, &list); err != nil {
				failed[g.Name] = err
			}
			for _, r := range list.Resources {
				served[r.Name] = append(served[r.Name], v.GroupVersion)
			}
		}
	}
	if len(failed) == 0 && len(served[Resource("NetworkPolicy")]) == 0 { // which every API server has
		none(errors.New("the API server names no networkpolicies: that it has no other kind is not believed"))
	}
	return served, failed
}

func (f *finder) get(ctx context.Context, path string, into any) error {
	body, err := f.rest.Get().AbsPath(path).Do(ctx).Raw()
	if err != nil {
		return fmt.Errorf("ask for the kinds: %w", err)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("ask for the kinds: %s: %w", path, err)
	}
	return nil
}
