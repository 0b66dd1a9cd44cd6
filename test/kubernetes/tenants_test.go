// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"

	"github.com/sluice-net/sluice/model/shares"
)

// TestTenantLabelIsGuarded: the base denies every request of users without the verb that changes the tenant label on
// a Namespace, including requests for subresources that accept labels.
func TestTenantLabelIsGuarded(t *testing.T) {
	all := render(t, filepath.Join(deploy, "base"))
	policy := get[admissionv1.ValidatingAdmissionPolicy](t, all, "ValidatingAdmissionPolicy/sluice-tenant-label")
	binding := get[admissionv1.ValidatingAdmissionPolicyBinding](t, all,
		"ValidatingAdmissionPolicyBinding/sluice-tenant-label")
	if binding.Spec.PolicyName != policy.Name || binding.Spec.MatchResources != nil || binding.Spec.ParamRef != nil ||
		!slices.Equal(binding.Spec.ValidationActions, []admissionv1.ValidationAction{admissionv1.Deny}) {
		t.Errorf("the binding does not enable %s everywhere: %+v", policy.Name, binding.Spec)
	}
	spec := policy.Spec
	if spec.FailurePolicy == nil || *spec.FailurePolicy != admissionv1.Fail ||
		len(spec.MatchConstraints.ResourceRules) != 1 ||
		spec.MatchConstraints.NamespaceSelector != nil || spec.MatchConstraints.ObjectSelector != nil ||
		len(spec.MatchConditions) != 1 || len(spec.Validations) != 1 {
		t.Fatalf("%+v", spec)
	}
	rule := spec.MatchConstraints.ResourceRules[0]
	if !slices.Equal(rule.Operations, []admissionv1.OperationType{admissionv1.Create, admissionv1.Update}) ||
		!slices.Equal(rule.Resources, []string{"namespaces", "namespaces/status", "namespaces/finalize"}) ||
		len(rule.ResourceNames) > 0 {
		t.Errorf("it is asked about %+v", rule)
	}
	label := `metadata.?labels[?"` + shares.DefaultTenantLabel + `"].orValue("")`
	c := spec.MatchConditions[0].Expression
	if strings.Count(c, "object."+label) != 1 || strings.Count(c, "oldObject."+label) != 1 {
		t.Errorf("it compares %s", c)
	}
	const want = `authorizer.group("sluice.io").resource("tenants").check("set").allowed()`
	if e := spec.Validations[0].Expression; e != want {
		t.Errorf("it allows %s", e)
	}
}
