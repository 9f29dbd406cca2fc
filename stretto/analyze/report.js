document.querySelectorAll('table[data-sort]').forEach(table=>{
 const body=table.tBodies[0];
 table.querySelectorAll('th').forEach((head,column)=>{
  const sort=()=>{
   const down=head.getAttribute('aria-sort')!=='descending';
   table.querySelectorAll('th').forEach(h=>h.removeAttribute('aria-sort'));
   head.setAttribute('aria-sort',down?'descending':'ascending');
   const value=row=>{const cell=row.cells[column];const n=cell.dataset.value;return n===undefined?cell.textContent:parseFloat(n)};
   const rows=[...body.rows],empty=row=>value(row)==='';  // cells without a value come last, both ways
   const kept=rows.filter(row=>!empty(row)).sort((a,b)=>{const x=value(a),y=value(b);return (x<y?1:x>y?-1:0)*(down?1:-1)});
   body.append(...kept,...rows.filter(empty));
  };
  head.tabIndex=0;head.addEventListener('click',sort);head.addEventListener('keydown',e=>{if(e.key==='Enter')sort()});
 });
});
document.querySelectorAll('input[data-for]').forEach(input=>input.addEventListener('input',()=>{
 const words=input.value.toLowerCase().split(/\s+/);
 for(const row of document.getElementById(input.dataset.for).tBodies[0].rows){const text=row.textContent.toLowerCase();row.hidden=!words.every(w=>text.includes(w))}
}));
