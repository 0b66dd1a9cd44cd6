// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/labelfilter"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/excludedlabels"
)

// filterFile stores the last filter of the identity service, which may be down when the policies are compiled again.
const filterFile = "label-filter.json"

// filterRecord is the content of filterFile.
type filterRecord struct {
	Workloads []labelfilter.Rule `json:"workloads"`
	Nodes     []labelfilter.Rule `json:"nodes"`
}

func (r filterRecord) filter() (excludedlabels.Filter, error) {
	workloads, err := labelfilter.New(r.Workloads)
	if err != nil {
		return excludedlabels.Filter{}, err
	}
	nodes, err := labelfilter.New(r.Nodes)
	return excludedlabels.Filter{Workloads: workloads, Nodes: nodes}, err
}

// loadFilter returns the filter of an earlier run, or the default before the first run.
func loadFilter(dir string, l *slog.Logger) (excludedlabels.Filter, error) {
	f := excludedlabels.Default()
	text, err := os.ReadFile(filepath.Join(dir, filterFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return f, err
	default:
		var r filterRecord
		if err = json.Unmarshal(text, &r); err == nil {
			f, err = r.filter()
		}
		if err != nil { // if the default differs, policies get stricter until the service sends its filter
			l.Warn("cannot read the stored label filter; using the default",
				"file", filterFile, log.Err(err))
			f = excludedlabels.Default()
		}
	}
	return f, nil
}

// SetLabelFilter stores the filter of the identity service. Policies whose selectors it affects are compiled again.
func (o *Owner) SetLabelFilter(ctx context.Context, workloads, nodes []labelfilter.Rule) error {
	r := filterRecord{Workloads: workloads, Nodes: nodes}
	f, err := r.filter()
	if err != nil {
		return err
	}
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	release, err := o.revising.Hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	_, err = loop.Ask(ctx, o.loop, opChange, func() (struct{}, error) {
		path := filepath.Join(o.dir, filterFile)
		if old, err := os.ReadFile(path); err != nil || !bytes.Equal(old, text) {
			o.problems.Note("filter of labels", durable.WriteFile(path, text, 0o600, durable.SyncAll))
		}
		return struct{}{}, o.refilter(&f)
	})
	return err
}

// refilter compiles the policies that a new filter affects.
func (o *Owner) refilter(f *excludedlabels.Filter) error {
	before := o.forms.filter.Load()
	o.forms.filter.Store(f)
	changed := o.policies.filter(f)
	if len(changed) == 0 {
		return nil
	}
	if err := o.compiler.apply(engine.Change{UpsertPolicies: changed}); err != nil {
		o.forms.filter.Store(before)
		o.policies.filter(before)
		return err
	}
	o.config.Log.Info("label filter changed, compiling policies again", "policies", len(changed))
	return nil
}
